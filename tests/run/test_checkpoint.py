"""Checkpoints of one process: exact on resuming, recognised when damaged, refused when another's."""

from __future__ import annotations

import errno
import json
import random
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.configs import merged, small_config
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from mm_grpo.config import GRPOConfig
from mm_grpo.config.section import leaves
from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.state import StateFile, mark_of
from mm_grpo.processors.base import load_processor
from mm_grpo.run.checkpoint import Checkpoints
from mm_grpo.run.manifest import read_checkpoint
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.same_run import deciding_fields, is_neutral, refuse_other_fields
from mm_grpo.types import Completion, Group

pytestmark = pytest.mark.lowest


def config_for(path: Path, **changes: Any) -> GRPOConfig:
    values = {
        "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 8},
        "optim": {"lr_scheduler_type": "cosine", "warmup_steps": 1},
        "run": {"max_steps": 6},
    }
    return small_config(path, **merged(values, changes))


def build(path: Path, dtype: torch.dtype = torch.float32, frozen: bool = False, **changes: Any) -> Learner:
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).train()
    model.model.visual.requires_grad_(not frozen)
    return Learner(model, load_processor(str(path)), config_for(path, **changes), 6)


def groups_of(learner: Learner, step: int) -> list[Group]:
    """Other completions at every step."""
    prompts = [tiny.sample("a", "what", (tiny.picture(1),)), tiny.sample("b", "just words")]
    return [
        Group(
            slot,
            learner.processor.prompt(sample),
            tuple(Completion((20 + step, 30 + g, 40 + slot), (-3.0,) * 3, "", "stop", g) for g in range(2)),
            (1.0, 0.0),
            (1.0, -1.0),
        )
        for slot, sample in enumerate(prompts)
    ]


def checkpoints_of(learner: Learner, folder: Path) -> Checkpoints:
    return Checkpoints(RunPaths(folder), learner, learner.config)


def saved(folder: Path, path: Path, steps: tuple[int, ...] = (1, 2)) -> Learner:
    """A learner that made two steps, with a checkpoint after each of `steps`."""
    learner = build(path)
    for step in (1, 2):
        learner.update(groups_of(learner, step))
        if step in steps:
            checkpoints_of(learner, folder).save(step, {"tokens_seen": 10 * step})
    return learner


@pytest.mark.parametrize(("dtype", "frozen"), [(torch.float32, True), (torch.bfloat16, False)])
def test_resuming_is_exact_to_the_bit(
    dtype: torch.dtype, frozen: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    path = models["qwen2_5_vl"]
    straight = build(path, dtype, frozen)
    for step in (1, 2, 3):
        straight.update(groups_of(straight, step))
    straight.optimizer.skip()  # a place in the schedule, and no step of AdamW
    checkpoints_of(straight, tmp_path).save(3, {"tokens_seen": 77})
    assert (straight.optimizer.updates, straight.optimizer.adam_steps) == (4, 3)
    drawn = [random.random(), float(torch.rand(()))]
    records = [straight.update(groups_of(straight, step)).updates for step in (4, 5)]

    resumed = build(path, dtype, frozen)
    found = checkpoints_of(resumed, tmp_path).newest()
    assert found is not None and found.step == 3 and found.extra == {"tokens_seen": 77}
    checkpoints_of(resumed, tmp_path).load(found)
    assert [random.random(), float(torch.rand(()))] == drawn
    assert [resumed.update(groups_of(resumed, step)).updates for step in (4, 5)] == records
    for (name, one), two in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two), name
    kept = straight.optimizer.fragments(), resumed.optimizer.fragments()
    for mine, theirs in zip(*kept, strict=True):
        assert all(torch.equal(t, theirs.tensors[k]) for k, t in mine.tensors.items())


def test_what_a_checkpoint_holds(models: dict[str, Path], tmp_path: Path) -> None:
    learner = saved(tmp_path, models["qwen2_vl"])
    folder = tmp_path / "checkpoints" / "step-000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {k: manifest[k] for k in ("format", "step", "updates", "adam_steps", "extra")} == {
        "format": 5, "step": 2, "updates": 2, "adam_steps": 2, "extra": {"tokens_seen": 20},
    }  # fmt: skip
    assert manifest["parameters"]["model.visual.merger.ln_q.weight"] == [64]
    tensors = load_file(folder / "state-00000-of-00001.safetensors")
    assert len(tensors) == 3 * len(manifest["parameters"])
    weight = learner.model.model.visual.merger.ln_q.weight
    assert torch.equal(tensors["master/model.visual.merger.ln_q.weight"], weight.detach())
    (mark,) = manifest["files"]
    assert mark == mark_of(folder / mark["name"])
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_the_newest_are_kept_and_leftovers_removed(models: dict[str, Path], tmp_path: Path) -> None:
    learner = build(models["qwen2_vl"], run={"keep_checkpoints": 2})
    kept = checkpoints_of(learner, tmp_path)
    for step in (1, 2, 3):
        kept.save(step, {})
        (kept.folder / ".step-000009.new").mkdir()  # of a process that was killed while it wrote
    kept.save(10, {})
    assert sorted(p.name for p in kept.folder.iterdir()) == ["step-000003", "step-000010"]


def test_damaged_checkpoints_do_not_push_out_whole_ones(models: dict[str, Path], tmp_path: Path) -> None:
    """The run went on from step 1, and takes step 2 and what is after it again."""
    learner = saved(tmp_path, models["qwen2_vl"])
    learner.config = learner.config.with_values({"run.keep_checkpoints": 1})
    kept = checkpoints_of(learner, tmp_path)
    shutil.copytree(kept.folder / "step-000002", kept.folder / "step-000005")
    truncate(kept.folder / "step-000005")
    truncate(kept.folder / "step-000002")
    found = kept.newest()
    assert found is not None and found.step == 1
    kept.save(2, {})
    assert sorted(p.name for p in kept.folder.iterdir()) == ["step-000002"]
    found = kept.newest()
    assert found is not None and found.step == 2


def truncate(folder: Path) -> None:
    file = next(folder.glob("state-*"))
    file.write_bytes(file.read_bytes()[:-100])


def test_the_log_is_kept_with_the_checkpoint(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    kept = checkpoints_of(saved(tmp_path, models["qwen2_vl"], (1,)), tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    found = kept.newest()
    assert found is not None and found.log == b'{"step": 1}\n'
    (kept.folder / "step-000001" / "metrics.jsonl").write_text("junk")
    with pytest.raises(ConfigError, match=r"step-000001/metrics.jsonl"):
        kept.newest()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"updates": 2', '"updates": 1'),
        ('"adam_steps": 2', '"adam_steps": 0'),
        ('"tokens_seen": 20', '"tokens_seen": 21'),
        ('"updates": 2', '"updates": 9, "updates": 2'),
        ('"frozen": ""', '"frozen":""'),
        ('"format": 5', '"format": 4'),
        ("}", ""),
    ],
)
def test_an_edited_manifest_is_refused(old: str, new: str, models: dict[str, Path], tmp_path: Path) -> None:
    kept = checkpoints_of(saved(tmp_path, models["qwen2_vl"], (2,)), tmp_path)
    file = kept.folder / "step-000002" / "manifest.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    for read in (kept.newest, lambda: read_checkpoint(file.parent, files=False)):
        with pytest.raises(ConfigError, match=r"step-000002.* (another|again)"):
            read()


def test_another_models_checkpoint_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    path = models["qwen2_vl"]
    checkpoints_of(build(path, frozen=True), tmp_path).save(1, {})
    other, moved = build(models["qwen3_vl"]), build(path, frozen=True)
    other.config = other.config.with_values({"model.path": str(path)})  # as if the folder had been replaced
    with torch.no_grad():
        moved.model.model.visual.merger.ln_q.weight[3] += 1
    for learner, words in ((other, "has shape"), (moved, "not trained")):
        kept = checkpoints_of(learner, tmp_path)
        found = kept.newest()
        assert found is not None
        before = {n: p.clone() for n, p in learner.model.named_parameters()}
        with pytest.raises(ConfigError, match=f"model.path = '{path}': .*{words}"):
            kept.load(found)
        assert all(torch.equal(p, before[n]) for n, p in learner.model.named_parameters())


def test_fields_that_decide_only_beside_others(models: dict[str, Path]) -> None:
    path = models["qwen2_vl"]
    optim, drop = {"max_tokens_per_pack": 99}, {"on_overlong": "drop"}
    for data, decides in (
        (drop, True),
        (drop | {"max_prompt_length": 92}, True),
        (drop | {"max_prompt_length": 91}, False),
    ):
        fields = deciding_fields(config_for(path, data=data, optim=optim))
        assert ("optim.max_tokens_per_pack" in fields) == decides
    assert is_neutral("run.dir") and not is_neutral("run.seed")
    for term, decides in (({"credit": "pgpo"}, False), ({"twin_view": {"view": "crop"}}, True)):
        assert ("optim.max_tokens_per_pack" in deciding_fields(config_for(path, algorithm=term))) == decides
    constant = {"optim": {"lr_scheduler_type": "constant"}}
    assert "run.max_steps" not in deciding_fields(config_for(path, **constant))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("leaf", [path for path, _ in leaves(GRPOConfig)])
def test_every_other_field_is_refused_by_name(leaf: str) -> None:
    twins = leaf.startswith("algorithm.twin_view.")
    rule = "vppo" if leaf.endswith((".top_share", ".beta_min")) else "pgpo"
    algorithm = {"twin_view": {"view": "crop"}} if twins else {"credit": rule}
    config = GRPOConfig.from_dict({"model": {"path": "x", "lora": {"rank": 2}}, "algorithm": algorithm})

    def changed(section: Any, names: list[str]) -> Any:
        value = changed(getattr(section, names[0]), names[1:]) if names[1:] else another
        return section.model_copy(update={names[0]: value})

    another = "y" if leaf == "model.path" else 77
    other = changed(config, leaf.split("."))
    with nullcontext() if is_neutral(leaf) else pytest.raises(ConfigError) as refused:
        refuse_other_fields(deciding_fields(other), deciding_fields(config), "it was", "put it back")
    assert refused is None or f"{leaf}.".startswith(f"{str(refused.value).partition(' = ')[0]}.")


def test_a_full_disk_is_one_message_and_leaves_the_last_good_one(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = checkpoints_of(saved(tmp_path, models["qwen2_vl"], (1,)), tmp_path)
    whole = {p: p.read_bytes() for p in (kept.folder / "step-000001").iterdir()}
    write = StateFile.write

    def full(file: StateFile, path: Path) -> Any:
        write(file, path)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StateFile, "write", full)
    with pytest.raises(ConfigError, match=r"run.dir = .*No space left on device\).*step-000001"):
        kept.save(2, {})
    assert [p.name for p in kept.folder.iterdir()] == ["step-000001"]
    assert {p: p.read_bytes() for p in whole} == whole
