"""What vLLM is asked for on a GPU, and its handle after failures: with stand-ins, and by vLLM's own source."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fake_vllm import FakeModel, digests, fake_adapters

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.rollout import transformers_engine
from mm_grpo.rollout.vllm import engine as engine_module
from mm_grpo.rollout.vllm import internals, launch
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.launch import EngineSettings, Handle, engine_arguments

SETTINGS = EngineSettings(model="unused", dtype="bfloat16", max_model_len=1024, sleep_level=2)


def source(*files: str) -> str:
    """The text of vLLM's files, which are not imported."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    return "\n".join((Path(found.origin).parent / file).read_text(encoding="utf-8") for file in files)


def engine(**calls: Any) -> Handle:
    step = SimpleNamespace(step=lambda: [])
    return Handle(SimpleNamespace(llm_engine=step, **calls), SETTINGS)


@pytest.mark.parametrize("call", ["wake", "sleep"])
def test_a_card_that_is_full_loses_the_engine_and_says_so(call: str) -> None:
    """Half of the allocations may be mapped then, so it is not used again; what sleeps is what slept."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62")

    handle = engine(wake_up=full, sleep=full)
    handle.asleep = {"weights", "kv_cache"} if call == "wake" else set()
    before = set(handle.asleep)
    with pytest.raises(EngineError) as found:
        internals.wake(handle, "weights") if call == "wake" else internals.sleep(handle, 2)
    assert "out of memory" in str(found.value.__cause__)
    assert handle.asleep == before and handle.fault is not None and "out of memory" in handle.fault


def test_layers_that_get_nothing_are_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    names = ("vllm.model_executor.model_loader.reload.layerwise", "vllm.v1.worker.gpu_model_runner")

    def reload(method: str, kwargs: Any) -> None:
        for name in names:
            logging.getLogger(name).warning("QKVParallelLinear: Failed to load weights")
            logging.getLogger(name).error("an error is still said")

    with caplog.at_level(logging.WARNING):
        internals.reload(engine(collective_rpc=reload), iter(()))
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


class LLM:
    """vLLM with a `FakeModel` in its worker."""

    def __init__(self) -> None:
        self.model: Any = FakeModel()
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: None)

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        self.model.load_weights(kwargs["weights_iterator"])
        self.model.finalize()

    def apply_model(self, work: Any) -> list[Any]:
        return [work(self.model)]

    def reset_prefix_cache(self) -> bool:
        return True


FAMILY = SimpleNamespace(looks_ahead=False)
PROCESSOR: Any = SimpleNamespace(family=FAMILY, media_token_ids={7}, stop_token_ids={1})


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """That of every `VLLMEngine`, which takes factors."""
    fake_adapters(monkeypatch)
    made = Handle(LLM(), SETTINGS, adapters=True)
    monkeypatch.setattr(engine_module, "launch", lambda settings: made)
    return made


def tensors(*names: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: torch.randn(4, 6).to(dtype) for name in names}


def factors_of(*layers: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return tensors(*(f"base_model.model.{n}.lora_{x}.weight" for n in layers for x in "AB"), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_at_rest_stay_beside_merges_in_the_engine(handle: Handle, dtype: torch.dtype) -> None:
    """Of layers a and b; c is merged. What did not come is held, and not said to have come."""
    made, model = VLLMEngine(SETTINGS, PROCESSOR), handle.llm.model
    weights = tensors("a.weight", "b.weight", "c.weight", dtype=dtype)
    factors = factors_of("a", "b", dtype=dtype)
    assert handle.adapter is None
    assert made.update_weights((weights | factors).items(), 0) == digests(weights | factors)
    assert handle.adapter is not None
    parts = factors_of("b", dtype=dtype), tensors("c.weight", dtype=dtype), factors_of("a", dtype=dtype)
    for version, part in enumerate(parts, 1):
        assert made.update_weights(part.items(), version) == digests(part)
        weights |= {name: tensor for name, tensor in part.items() if name in weights}
        factors |= {name: tensor for name, tensor in part.items() if name in factors}
        assert (digests(model.adapter), digests(model.weights)) == tuple(map(digests, (factors, weights)))
        assert (made.version, made.holds_weights) == (version, True)

    def breaks() -> Any:
        yield "c.weight", weights["a.weight"]
        raise ValueError("of the learner")

    with pytest.raises(ValueError, match="of the learner"):
        made.update_weights(breaks(), 4)
    assert (made.version, made.holds_weights) == (3, False)
    other = VLLMEngine(SETTINGS, PROCESSOR)  # of another run, which merges all
    assert not other.holds_weights and handle.adapter is None
    assert other.update_weights(weights.items(), 0) == digests(weights)
    assert other.holds_weights and not made.holds_weights and not model.adapter and handle.adapter is None


def test_what_is_the_same_to_the_bit_is_lent_and_given_back(handle: Handle) -> None:
    made, model = VLLMEngine(SETTINGS, PROCESSOR), handle.llm.model
    weights = tensors("same.weight", "merged.weight", "wider.weight")
    made.update_weights(weights.items(), 0)
    own = weights | {"merged.weight": weights["merged.weight"] + 1, "other.weight": torch.zeros(2)}
    own["wider.weight"] = own["wider.weight"].float()
    parameters = {name: torch.nn.Parameter(t.clone(), requires_grad=False) for name, t in own.items()}
    assert made.share(parameters) == 4 * 6 * 2
    lent = {n for n, p in parameters.items() if n in weights and p.data_ptr() == model.weights[n].data_ptr()}
    assert lent == {"same.weight"} and [id(p) for p in handle.lent] == [id(parameters["same.weight"])]
    VLLMEngine(SETTINGS, PROCESSOR)  # is about to bring weights of its own
    for tensor in model.weights.values():
        tensor.zero_()
    assert not handle.lent and all(torch.equal(parameters[name], tensor) for name, tensor in own.items())


def test_an_engine_beside_a_learner_asks_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = engine_arguments(SETTINGS)
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (256, 8192)
    assert found["enable_sleep_mode"] is True
    own = EngineSettings("unused", "bfloat16", 1024, engine_kwargs=(("max_num_seqs", 512),))
    assert engine_arguments(own)["max_num_seqs"] == 512
    assert not launch.BESIDE_A_LEARNER.keys() & engine_arguments(SETTINGS, dedicated=True).keys()


def test_the_embedded_engine_says_on_a_gpu_what_vllm_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(device: str, found: object) -> str:
        monkeypatch.setattr(transformers_engine, "find_spec", lambda name: found)
        engine: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
        return str(transformers_engine.TransformersEngine.sentence.fget(engine))  # type: ignore[attr-defined]

    assert "rollout.engine=vllm" in said("cuda", "vllm")
    assert said("cuda", None) == said("cpu", "vllm") == ""


def test_the_allocator_s_variable_is_one_that_vllm_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    main = import_module("mm_grpo.cli.main")
    seen: list[str | None] = []
    monkeypatch.setattr(main, "app", lambda arguments: seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF")))
    monkeypatch.setattr(main.sys, "excepthook", main.sys.excepthook)
    monkeypatch.setattr(main, "end_with_launcher", lambda: None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    main._main()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    main._main()
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    main._main()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert seen == ["max_split_size_mb:512", None, "expandable_segments:True"]
    assert "PYTORCH_CUDA_ALLOC_CONF" in source("device_allocator/alloc_conf.py")


def test_a_missing_system_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM goes on without its kernels if libnuma is missing, and fails in the middle of its start."""
    monkeypatch.setattr(launch, "_RUNNING", {})
    monkeypatch.setattr("ctypes._dlopen", lambda name, *_: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(ConfigError, match="libnuma"):
        launch.launch(SETTINGS)
