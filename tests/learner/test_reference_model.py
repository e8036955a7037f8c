"""Another model as the reference policy: a teacher for the policy's own samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.steps import config_for, learner_of, load, make_groups, plain_logp

from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.types import Group


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("teacher"), seed=7)


def made(path: Path, teacher: Path, model: Any = None, **changes: Any) -> tuple[Learner, list[Group]]:
    learner = learner_of(path, model, algorithm={"beta": 1.0, "reference_path": str(teacher)}, **changes)
    return learner, make_groups(learner.processor)


def test_its_log_probs_are_the_teachers_own(models: dict[str, Path], teacher: Path) -> None:
    """With a frozen tower, whose features the policy's passes share: the teacher has a tower of its own."""
    model = load(models["qwen2_5_vl"])
    model.model.visual.requires_grad_(False)
    learner, groups = made(models["qwen2_5_vl"], teacher, model, optim={"updates_per_step": 2})
    learner._keep_image_features(2)
    assert learner.module.features is not None
    found = learner.reference_logprobs([(g.prompt, g.completions) for g in groups])
    own = load(teacher)
    for group, of_group in zip(groups, found, strict=True):
        for completion, values in zip(group.completions, of_group, strict=True):
            want = plain_logp(own, learner.config, group, completion)[0].tolist()
            assert values == pytest.approx(want, abs=1e-5)


def test_without_rewards_the_policy_goes_to_the_teacher(models: dict[str, Path], teacher: Path) -> None:
    optim = {"learning_rate": 3e-3, "adam_epsilon": 1e-8}
    learner, groups = made(models["qwen2_5_vl"], teacher, load(models["qwen2_5_vl"]).bfloat16(), optim=optim)
    assert learner.reference is not None and learner.reference.model.dtype == torch.bfloat16
    groups = [Group(g.slot, g.prompt, g.completions, g.rewards, (0.0,) * len(g.completions)) for g in groups]
    before = [p.clone() for p in learner.reference.model.parameters()]
    kl = [learner.update(groups).metrics["kl"] for _ in range(12)]
    assert kl[0] > 0.01 and kl[-1] < 0.5 * kl[0]
    assert all(torch.equal(a, b) for a, b in zip(before, learner.reference.model.parameters(), strict=True))


def test_adapters_learn_from_a_teacher(models: dict[str, Path], teacher: Path) -> None:
    from mm_grpo.build import build_parts

    algorithm = {"beta": 1.0, "reference_path": str(teacher)}
    config = config_for(models["qwen2_5_vl"], model={"lora": {"rank": 4}}, algorithm=algorithm)
    learner = build_parts(config, 3, []).learner
    assert learner.reference is not None and learner.reference.model is not learner.model
    assert not hasattr(learner.reference.model, "peft_config")


def test_models_that_cannot_teach_are_refused(models: dict[str, Path], teacher: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["w"], vocabulary["h"] = vocabulary["h"], vocabulary["w"]
    file.write_text(json.dumps(content))
    for folder, words in (
        (models["qwen2_vl"], "it is a qwen2_vl, and the policy a qwen2_5"),
        (tmp_path / "nothing", "nothing'"),
        (other, r"its token \d+ is '[hw]', and the policy's '[hw]'; the reference is given"),
    ):
        with pytest.raises(ConfigError, match=rf"^algorithm.reference_path = '.*{words}"):
            made(models["qwen2_5_vl"], folder)
