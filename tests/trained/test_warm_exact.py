"""A step of the warm start against plain transformers: own processor and chat template, labels on the answer alone.

As a script it is one process of a warm start: `test_warm_exact.py MODEL FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import processes, tiny
from helpers.configs import merged, small_config
from helpers.families import TABLE, assert_same
from helpers.small_runs import rows_of
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mm_grpo.config import GRPOConfig, LoRAConfig
from mm_grpo.data.sources import load
from mm_grpo.learner import optimizer, zero
from mm_grpo.learner.lora import add_adapters
from mm_grpo.learner.optimizer import Optimizer
from mm_grpo.processors.base import load_processor
from mm_grpo.warm_start import warm


def message(role: str, text: str, images: int = 0) -> dict[str, Any]:
    return {"role": role, "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}


TALK = [message("user", "and this", 1), message("assistant", "blue"), message("user", "sure?")]
PICTURES = [tiny.picture(1), tiny.picture(2, 56, 112), tiny.picture(3, 112, 84), tiny.picture(4)]
GOLDS = ("a red thing", "5", "the second one, I think", "yes")
ROWS: list[dict[str, Any]] = [
    {"prompt": [message("user", "what is it", 1)], "images": PICTURES[:1], "answer": GOLDS[0]},
    {"prompt": [message("user", "no picture at all")], "answer": GOLDS[1]},
    {"prompt": [message("user", "which", 2)], "images": PICTURES[1:3], "answer": GOLDS[2]},
    {"messages": [*TALK, message("assistant", GOLDS[3])], "images": PICTURES[3:]},
]
SETTINGS: dict[str, Any] = {
    "rollout": {"temperature": 0.7, "max_staleness": 1, "engine": "vllm_server"},
    "algorithm": {"loss_type": "grpo", "beta": 0.3, "entropy_coef": 0.2, "top_entropy_quantile": 0.5}
    | {"importance_sampling_mode": "auto", "num_iterations": 2, "credit": "pgpo"},
    "optim": {"updates_per_step": 2},
}
"""Of the run to come, each of which would change the loss."""
LIMITS = {"qwen2_vl": 2e-6, "qwen3_vl": 2e-6, "qwen3_vl_moe": 2e-6, "qwen3_5": 4e-6, "qwen3_5_moe": 5e-6}
"""Of gradients, if not 1e-6: the first have 9.1e-7, 8.2e-7 and 1.1e-6 here, which another CPU rounds otherwise; in
linear attention plain fp32 is itself 3.0e-6 from fp64, and the warm start 2.8e-6, or 3.5e-6 with experts."""
Step = tuple[float, dict[str, Tensor]]
"""A loss, and its gradients by parameter before they are clipped."""


def config_for(path: Path, folder: Path, **changes: Any) -> GRPOConfig:
    fixed = {
        "model": {"device": "cpu", "dtype": "float32"},
        "rollout": {"prompts_per_step": len(ROWS), "max_completion_length": 60},
        "data": {"shuffle": False, "text_only": True},
    }
    return small_config(path, folder, **merged(fixed, changes))


def warm_step(config: GRPOConfig) -> Step:
    """One step of the warm start on ROWS, which makes one update."""
    updates: list[dict[str, Tensor]] = []
    apply = Optimizer.apply

    def noted(self: Optimizer, live: int) -> Any:
        pairs = zip(self.named, self.masters, strict=True)
        updates.append({name: m.grad.clone() for name, m in pairs if m.grad is not None})
        return apply(self, live)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "apply", noted)
        warm(config, answer="answer", steps=1, train=ROWS)
    ((row,), (gradients,)) = rows_of(Path(config.run.dir + "-warm")), updates
    return row["loss"], gradients


def plain_step(model: Any, config: GRPOConfig) -> Step:
    """The mean cross-entropy of all tokens of GOLDS, and its gradients, summed over rows in fp64."""
    processor: Any = load_processor(config.model.path)
    rows, batch = load(ROWS, config.data), []
    for index, gold in enumerate(GOLDS):
        prompt = processor.prompt(rows.sample(index))

        def inputs_of(messages: Any, prompt: Any = prompt, **options: bool) -> dict[str, Tensor]:
            text = processor.hf.apply_chat_template(messages, tokenize=False, **options)
            images = list(prompt.engine_prompt.images) or None
            options = {"return_tensors": "pt", "add_special_tokens": False}
            return dict(processor.hf(text=[text], images=images, **options))

        start = inputs_of(prompt.sample.messages, add_generation_prompt=True)["input_ids"].shape[1]
        inputs = inputs_of([*prompt.sample.messages, message("assistant", gold)])
        labels = inputs["input_ids"].clone()
        stops = torch.isin(labels[0], torch.tensor(sorted(processor.stop_token_ids))).nonzero()
        end = int(stops[stops >= start][0]) + 1
        labels[:, :start], labels[:, end:] = -100, -100
        batch.append((inputs, labels, end - start))
    loss, gradients = 0.0, dict[str, Tensor]()
    for inputs, labels, tokens in batch:
        model.zero_grad()
        share = model(**inputs, labels=labels, use_cache=False).loss * tokens / sum(n for *_, n in batch)
        share.backward()
        loss += share.item()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0.0) + parameter.grad.double()
    return loss, gradients


def load_plain(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).train()


def assert_equal(got: Step, want: Step, *, loss: float = 1e-6, gradients: float = 1e-6) -> None:
    """The loss relative to the plain one, the gradients' difference relative to the norm of all."""
    assert got[0] == pytest.approx(want[0], rel=loss)
    assert {name for name, t in got[1].items() if t.any() or name in want[1]} == want[1].keys()
    pairs = [(got[1][name] - t, t) for name, t in want[1].items()]
    off, norm = (float(torch.stack([p[i].norm() for p in pairs]).norm()) for i in (0, 1))
    assert norm > 0 and off <= gradients * norm


@pytest.mark.parametrize("family", TABLE)
def test_loss_and_gradients_are_plain_ones(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    config = config_for(models[family], tmp_path)
    want = plain_step(load_plain(models[family]), config)
    assert_equal(warm_step(config), want, gradients=LIMITS.get(family, 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("family", TABLE)
def test_bfloat16_rounds_as_plain_bfloat16(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Plain transformers' gradients in bfloat16, summed over rows in fp64, are themselves 1 to 5 % from fp32's."""
    config = config_for(models[family], tmp_path, model={"dtype": "bfloat16"})
    want = plain_step(load_plain(models[family], torch.bfloat16), config)
    assert_equal(warm_step(config), want, loss=2e-4, gradients=0.02)


def test_packs_and_settings_of_the_run_change_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    path = models["qwen2_5_vl"]
    want = plain_step(load_plain(path), config_for(path, tmp_path))
    for packs, changes in ((3, {"optim": {"max_tokens_per_pack": 80}}), (1, SETTINGS)):
        config = config_for(path, tmp_path / str(packs), **changes)
        assert_equal(warm_step(config), want)
        (row,) = rows_of(Path(config.run.dir + "-warm"))
        assert (row["learner/packs"], row["learner/updates"]) == (packs, 1)


@pytest.mark.slow
def test_gradients_of_adapters(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(model: Any, lora: LoRAConfig, family: Any) -> None:
        add_adapters(model, lora, family)
        generator = torch.Generator().manual_seed(3)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:  # beside factors B of 0, as they begin, A would have no gradient
                parameter.data.normal_(std=0.02, generator=generator)

    monkeypatch.setattr("mm_grpo.learner.model.add_adapters", filled)
    config = config_for(models["qwen2_5_vl"], tmp_path, model={"lora": {"rank": 4, "vision": True}})
    plain = load_plain(models["qwen2_5_vl"])
    filled(plain, LoRAConfig(rank=4, vision=True), load_processor(config.model.path).family)
    assert_equal(warm_step(config), plain_step(plain, config))


def change_of(path: Path, folder: Path) -> dict[str, Tensor]:
    """How far a step of SGD moves the weights: the gradient, large beside the rounding of what it is added to."""
    optim = {"learning_rate": 1000.0, "max_grad_norm": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "adamw", lambda parameters, *_, **__: torch.optim.SGD(parameters, lr=1.0))
        patch.setattr(zero, "BUCKET", 30_000)  # less than the model, more and less than its tensors
        warm(config_for(path, folder, optim=optim), answer="answer", steps=1, train=ROWS)
    before, after = (load_file(f / "model.safetensors") for f in (path, Path(f"{folder}-warm") / "model"))
    return {name: after[name] - weight for name, weight in before.items()}


@pytest.mark.slow
def test_two_processes_of_zero_2_make_the_update_of_one(models: dict[str, Path], tmp_path: Path) -> None:
    path = models["qwen2_5_vl"]
    codes = processes.launch(Path(__file__), 2, (path, tmp_path / "two"), tmp_path / "output", deadline=200.0)
    assert codes == [0, 0], processes.outputs(tmp_path / "output", 2)
    assert_same(torch.load(tmp_path / "two.pt"), change_of(path, tmp_path / "one"))


if __name__ == "__main__":
    torch.save(change_of(Path(sys.argv[1]), Path(sys.argv[2])), sys.argv[2] + ".pt")
