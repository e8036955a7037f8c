"""vLLM beside the learner on one GPU: what no CPU has, which runs vLLM's other model runner and frees nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from test_run_gpu import BASE, check_metrics, trainer_of

from mm_grpo import GRPOTrainer
from mm_grpo.preflight.memory import ModelSizes, device_memory, largest_of, memory_of_run
from mm_grpo.preflight.out_of_memory import OutOfDeviceMemory
from mm_grpo.processors.base import load_processor, mm_processor_kwargs
from mm_grpo.rollout.engine import Request, Sampling, requests_for
from mm_grpo.rollout.vllm import internals
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.launch import EngineSettings
from mm_grpo.rollout.weights import WeightLedger

TWELVE = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def engine(models: dict[str, Path]) -> Iterator[tuple[VLLMEngine, Any]]:
    """An engine in bf16 that can sleep, and the model whose weights it is sent."""
    pytest.importorskip("vllm")
    from transformers import AutoModelForImageTextToText

    path = models["qwen2_5_vl"]
    processor = load_processor(str(path))
    settings = EngineSettings(
        str(path), "bfloat16", 1024, tuple(mm_processor_kwargs(processor).items()), gpu_memory_utilization=0.1,
        sleep_level=2,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16).cuda()
    yield VLLMEngine(settings, processor), model


def tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, p.detach()) for name, p in model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sleep_scores_are_those_of_before(
    engine: tuple[VLLMEngine, Any], level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """To the bit; level 2 drops the weights, which all come again, and neither is a page of warnings."""
    own, model = engine
    prompt = own.processor.prompt(tiny.sample("one", "what is it", (tiny.picture(1),)))
    ledger = WeightLedger()
    ledger.send(own, tensors(model), 0)
    before = own.score(prompt, [40, 41, 42, 50])
    free = torch.cuda.mem_get_info()[0]
    internals.sleep(own._handle, level)
    own._current = level < 2
    assert torch.cuda.mem_get_info()[0] - free > 0.05 * torch.cuda.mem_get_info()[1]
    with caplog.at_level(logging.WARNING):
        assert bool(ledger.send(own, tensors(model), 1).digests) is (level == 2)
    assert "Failed to load" not in caplog.text
    assert own.score(prompt, [40, 41, 42, 50]) == before


def test_a_seed_s_samples_are_the_same_alone_and_in_a_batch(engine: tuple[VLLMEngine, Any]) -> None:
    own, model = engine
    WeightLedger().send(own, tensors(model), 2)
    prompts = [own.processor.prompt(tiny.sample(f"r{i}", "what is it", (tiny.picture(i),))) for i in range(3)]
    together = own.generate(requests_for(prompts, [range(8 * i, 8 * i + 8) for i in range(3)], TWELVE))
    alone = [own.generate([Request(prompts[1], seed, TWELVE)])[0] for seed in range(8, 16)]
    assert [c.token_ids for c in together[8:16]] == [c.token_ids for c in alone]
    banned = own.processor.media_token_ids  # a bias of -inf
    assert not any(banned & set(c.token_ids) for c in together)


def test_a_run_stays_within_its_estimate(tmp_path: Path, run_python: Callable[..., None]) -> None:
    """In a process of its own: one engine lives in each."""
    run_python("-c", RUN.format("small_run"), tmp_path)
    check_metrics(tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_a_server_gets_its_weights_by_nccl(tmp_path: Path, run_python: Callable[..., None]) -> None:
    fields = "run.max_steps=4 data.eval=null run.eval_every=0 run.expected_curve=null optim.warmup_steps=0"
    own = (f"run.dir={tmp_path / 'r'}", "rollout.server.transfer=nccl", "--serve", 1)
    run_python("-m", "mm_grpo.cli", "train", BASE.parent / "config.yaml", *own, *fields.split())
    check_metrics(tmp_path)


def test_a_card_that_is_full_at_a_wake(tmp_path: Path, run_python: Callable[..., None]) -> None:
    run_python("-c", RUN.format("run_on_a_full_card"), tmp_path)


RUN = "import sys, test_vllm_gpu; test_vllm_gpu.{}(sys.argv[1])"


def beside_vllm(folder: str) -> GRPOTrainer:
    return trainer_of(Path(folder), engine="vllm", vllm={"gpu_memory_utilization": 0.2})


def run_on_a_full_card(folder: str) -> None:
    """Somebody takes all memory but 256 MiB while the engine sleeps: the weights come back, and the cache does not."""
    trainer, taken = beside_vllm(folder), list[torch.Tensor]()
    update = trainer.learner.update

    def greedy(groups: Any) -> Any:
        report = update(groups)
        torch.cuda.empty_cache()
        taken.append(torch.empty(torch.cuda.mem_get_info()[0] - 2**28, dtype=torch.uint8, device="cuda"))
        return report

    trainer.learner.update = greedy  # type: ignore[method-assign]
    with pytest.raises(OutOfDeviceMemory):
        trainer.train()
    engine: Any = trainer.engine
    assert engine._handle.fault is not None and "kv_cache" in engine._handle.asleep


def small_run(folder: str) -> None:
    """Three steps beside vLLM; what the GPU held while each side worked, against the estimate and a tenth."""
    free, total = torch.cuda.mem_get_info()
    others, trainer = total - free, beside_vllm(folder)
    held: list[int] = []
    sleep = trainer.engine.sleep

    def watched() -> None:
        free, total = torch.cuda.mem_get_info()
        held.append(total - free - others)
        sleep()

    trainer.engine.sleep = watched  # type: ignore[method-assign]
    trainer.train()
    card = device_memory(torch.device("cuda"))
    found = memory_of_run(
        ModelSizes.of(trainer.model), largest_of(trainer.processor, trainer.config), trainer.config, card, processes=1,
        checkpointing=trainer.learner.checkpointing,
    )  # fmt: skip
    sys.exit(
        0 if max(held) <= 1.1 * sum(found.rollout.values()) else f"held {held}, estimated {found.rollout}"
    )
