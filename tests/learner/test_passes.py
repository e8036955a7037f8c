"""Passes that are left out change nothing, and those that are made agree where the policies are one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import assert_same
from helpers.steps import LENGTHS, learner_of, load, make_groups, plain_logp, update_of

from mm_grpo.algorithm.masks import top_entropy_mask
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner import optimizer
from mm_grpo.learner.image_features import ImageFeatures
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.minibatch import LogProbs, Minibatch, make_items
from mm_grpo.learner.pack import layout
from mm_grpo.processors.base import load_processor


@pytest.fixture
def sgd(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What of the config makes updates the gradients, and so large that the rounding of weights is nothing. AdamW's
    first step divides each gradient by itself, and makes as much of a small one's rounding."""
    monkeypatch.setattr(optimizer, "adamw", lambda params, *_, **__: torch.optim.SGD(params, lr=1.0))
    return {"learning_rate": 1000.0}


@pytest.mark.parametrize("family", ["qwen3_vl", tiny.HYBRID])
@pytest.mark.field_bug("old-log-probs")
def test_old_reference_and_new_log_probs_agree_on_one_policy(family: str, models: dict[str, Any]) -> None:
    """Old and reference are run in other packs than new, without gradients, over the same weights."""
    learner = learner_of(models[family], algorithm={"beta": 0.1}, optim={"max_tokens_per_pack": 120})
    processor, config = learner.processor, learner.config
    groups = make_groups(processor)
    items = make_items(groups, config.algorithm)
    old, reference = learner.run(items)[0], learner._reference_values(items)
    rows = [(g, c) for g in groups for c in g.completions]
    for item, (group, completion) in zip(items, rows, strict=True):
        pack = layout([[item]], processor.media_token_ids)
        new = learner.module(pack).logp.detach()  # with gradients, alone
        plain = plain_logp(learner.model, config, group, completion)[0].detach()
        for values in (old[item.index], reference[item.index], plain):
            assert float((values - new).abs().max()) <= 1e-6 * max(1.0, float(new.abs().max()))


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_the_old_pass_may_be_left_out(loss_type: str, models: dict[str, Any], sgd: dict[str, float]) -> None:
    changes: dict[str, Any] = {"algorithm": {"loss_type": loss_type}, "optim": sgd}
    learner = learner_of(models["qwen2_vl"], **changes)
    groups = make_groups(learner.processor)
    skipped, _ = update_of(learner, groups)
    learner = learner_of(models["qwen2_vl"], **changes)
    update = learner._update_on

    def with_old(minibatch: Minibatch, logprobs: LogProbs, statistics: Any) -> Any:
        logprobs.old = learner.run(minibatch.live)[0]
        return update(minibatch, logprobs, statistics)

    learner._update_on = with_old  # type: ignore[method-assign]
    made, _ = update_of(learner, groups)
    assert_same(skipped, made, 1e-6)


@pytest.mark.parametrize("updates", [1, 2])
def test_groups_without_advantage_change_nothing(
    updates: int, models: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    one = updates == 1  # a second update from there would start from ruins
    case = {"updates_per_step": updates, **(request.getfixturevalue("sgd") if one else {})}
    path = models["qwen2_5_vl"]
    processor = load_processor(str(path))
    groups = make_groups(processor)
    pruned, less = update_of(learner_of(path, optim=case), groups)
    # an entropy weight too small to be seen keeps every completion in
    whole, more = update_of(learner_of(path, optim=case, algorithm={"entropy_coef": 1e-30}), groups)
    assert less["learner/tokens"] < more["learner/tokens"]
    assert_same(pruned, whole, 2e-6 if one else 1e-4)


def test_features_of_a_frozen_tower_are_kept(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Old pass, reference pass, two updates, two iterations, groups split over packs: 5 images, encoded once each."""

    def frozen() -> Learner:
        model = load(models["qwen3_vl"])
        model.model.visual.requires_grad_(False)
        algorithm = {"beta": 0.2, "num_iterations": 2, "top_entropy_quantile": 0.7}
        optim = {"updates_per_step": 2, "max_tokens_per_pack": 60}
        return learner_of(models["qwen3_vl"], model, algorithm=algorithm, optim=optim)

    learner = frozen()
    groups = make_groups(learner.processor)
    kept, metrics = update_of(learner, groups)
    assert metrics["learner/images_encoded"] == 5
    monkeypatch.setattr(type(learner.processor.family), "tower_is_frozen", lambda family, model: False)
    plain, metrics = update_of(frozen(), groups)
    assert metrics["learner/images_encoded"] > 5 * 5
    assert_same(kept, plain, 1e-4)


def test_features_are_those_of_the_tower_in_any_order(models: dict[str, Any]) -> None:
    path = models["qwen3_vl"]
    processor, model = load_processor(str(path)), load(path)
    groups = make_groups(processor)
    two, one = groups[0].prompt, groups[2].prompt
    features = ImageFeatures(model.requires_grad_(False), processor.family, keep=True)
    features.of([one])
    found = features.of([two, one, two])
    assert features.encoded == 3
    media = [p.vision for p in (two, one, two)]
    pixels, grids = (torch.cat([m[key] for m in media]) for key in ("pixel_values", "image_grid_thw"))
    direct = model.model.get_image_features(pixels, grids, return_dict=True)
    assert len(found.images) == 5 and len(found.levels) == 1
    output = processor.family.output(found)
    levels = [(o.pooler_output, *o.deepstack_features) for o in (output, direct)]
    for ours, theirs in zip(*levels, strict=True):
        torch.testing.assert_close(ours, theirs)  # image by image, or one tensor, as levels were before 5.19


@pytest.mark.parametrize("max_tokens", [16384, 60], ids=["one-pack", "many-packs"])
def test_the_top_entropies_are_those_of_the_whole_update(max_tokens: int, models: dict[str, Any]) -> None:
    """Against the loss by the book: tokens below the quantile have no term, and count in the denominator."""
    algorithm = {"top_entropy_quantile": 0.4, "entropy_coef": 0.3}
    optim = {"max_tokens_per_pack": max_tokens}
    learner = learner_of(models["qwen2_vl"], algorithm=algorithm, optim=optim)
    processor, config = learner.processor, learner.config
    groups = make_groups(processor)
    ours, metrics = update_of(learner, groups)

    model = load(models["qwen2_vl"])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    rows = [(g, c, a) for g in groups for c, a in zip(g.completions, g.advantages, strict=True)]
    found = [plain_logp(model, config, g, c) for g, c, _ in rows]
    entropies = torch.cat([f[1].detach() for f in found])
    top = top_entropy_mask(entropies, 0.4)
    parts = top.split([f.shape[1] for f in found])
    total = sum(sum(lengths) for lengths in LENGTHS)
    loss = torch.zeros(())
    for (_, _, advantage), (logp, entropy), chosen in zip(rows, found, parts, strict=True):
        ratio = (logp - logp.detach()).exp()
        loss = loss - (ratio * advantage * chosen).sum() / total - 0.3 * (entropy * chosen).sum() / top.sum()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    adam.step()
    assert_same(ours, {n: p.detach() - before[n] for n, p in model.named_parameters()}, 1e-4)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert 0 < int(top.sum()) < total


def test_a_reference_for_rewards_is_out_of_the_loss(models: dict[str, Any], tmp_path: Path) -> None:
    path = models["qwen2_vl"]
    learner = learner_of(path, algorithm={"beta": 0.5, "kl_in_reward": True, "kl_estimator": "k1"})
    groups = make_groups(learner.processor)
    plain, _ = update_of(learner_of(path), groups)
    ours, metrics = update_of(learner, groups)
    assert_same(ours, plain, 1e-6)
    assert "kl" not in metrics
    # after the update the reference is still the policy of the start
    group = groups[2]
    (found,) = learner.reference_logprobs([(group.prompt, group.completions)])
    start = load(path)
    for values, c in zip(found, group.completions, strict=True):
        want = plain_logp(start, learner.config, group, c)[0].tolist()
        assert values == pytest.approx(want, abs=1e-5)


def test_an_error_of_a_pass_fails_everywhere(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[tuple[str, str]] = []

    class Noted(Ranks):
        @contextmanager
        def fail_together(self, what: str) -> Iterator[None]:
            try:
                yield
            except ValueError as error:
                failed.append((what, str(error)))
                raise

    def fails(pack: Any) -> Any:
        raise ValueError("no memory")

    learner = learner_of(models["qwen2_vl"], algorithm={"beta": 0.1})
    learner.ranks = Noted()
    monkeypatch.setattr(learner.reference, "forward", fails)
    with pytest.raises(ValueError, match="no memory"):
        learner.update(make_groups(learner.processor))
    assert failed == [("a pass without gradients", "no memory")]
