"""The update of a step is the same on 1, 2 and 4 processes, at every ZeRO stage, in any packs.

Each launch runs all its cases in one start of real processes: DeepSpeed's at stages 1 and 2, torch's fully_shard at 3.
What is compared is the change of the weights, tensor by tensor, with that of one process, one pack and no DeepSpeed:
equal parameters on all processes would prove nothing, since they gather the same wrong values. SGD at rate 1 makes the
update the gradient itself, so that no constant factor can hide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import updates
from helpers import processes
from helpers.configs import merged
from helpers.families import is_rounding, limit_of

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.health.checks import update_happens
from mm_grpo.types import UpdateRecord

pytestmark = pytest.mark.lowest

LOSSES = ("grpo", "dr_grpo", "luspo")
"""One for each way to count completions and tokens; dapo's, the default, is in all other cases."""
Case = dict[str, Any]
Results = dict[str, list[dict[str, Any]]]
Launcher = Callable[[str, int, tuple[Case, ...]], Results]


def case(name: str, **fields: Any) -> Case:
    sections = {k: fields.pop(k) for k in ("algorithm", "optim", "rollout") if k in fields}
    return {"name": name, "optimizer": "sgd", "packs": "some", "config": sections, **fields}


def matrix() -> list[Case]:
    """Pairs of {stage}, {1 pack of 16, 16 packs of 1} and {SGD, AdamW}, and the loss types."""
    cases = [
        case(f"{each}-{stage}-{packs}", set="flat", packs=packs, optimizer=each, optim={"zero_stage": stage})
        for each, stage, packs in (
            ("sgd", 0, "many"), ("sgd", 2, "one"), ("sgd", 2, "many"), ("adamw", 1, "many"), ("adamw", 2, "many"),
            ("sgd", 3, "many"), ("adamw", 3, "one"),
        )
    ]  # fmt: skip
    cases.append(case("videos", set="videos"))
    cases += [case(f"loss-{name}", algorithm={"loss_type": name}) for name in LOSSES]
    for stage in (0, 2, 3):
        cases.append(case(f"clipped-{stage}", optim={"zero_stage": stage, "max_grad_norm": 100.0}))
        # small for the ratios, and large beside the rounding of weights near 1: that is 3e-5 of rate 1e-3
        optim = {"zero_stage": stage, "updates_per_step": 2, "learning_rate": 1e-2}
        iterated = {"beta": 0.3, "num_iterations": 2}
        cases.append(case(f"iterated-{stage}", optimizer="adamw", optim=optim, algorithm=iterated))
    masked = {"loss_type": "grpo", "mask_truncated_completions": True, "entropy_coef": 0.5}
    cases.append(case("masked", algorithm=masked))
    perceived = {"perception_coef": 0.3, "perception_entropy_coef": 0.1}
    cases.append(case("perception", set="apart", algorithm=perceived))
    cases.append(case("credit", set="uneven", algorithm={"credit": "pgpo"}))
    crops = {"twin_view": {"view": "crop", "coef": 500.0}}  # as large as the advantages
    cases.append(case("twins", set="apart", algorithm=crops, sharp=True))
    of_turns = {"turn_gamma": 0.9, "credit": "vppo"}
    cases.append(case("credit-turns", set="apart", turns=True, algorithm=of_turns))
    cases.append(case("offloaded-adamw", optimizer="adamw", optim={"offload_optimizer": True}))
    cases.append(case("turns", turns=True, algorithm={"turn_gamma": 0.9}))
    cases.append(case("lora", lora=4, algorithm={"beta": 0.1}))
    if find_spec("bitsandbytes") is not None:
        four_bits = {"lora": 4, "quantization": "nf4", "algorithm": {"beta": 0.1}}
        cases.append(case("qlora-offloaded", optim={"offload_optimizer": True}, **four_bits))
    return cases


def trouble() -> list[Case]:
    """What makes processes differ: they must not hang, and must make the one update."""
    # beta makes every completion run; where the policy is the reference, its gradient is 0
    beta = {"algorithm": {"beta": 0.1}}
    kinds: dict[str, Case] = {
        **{rows: {"set": rows} for rows in ("uneven", "apart", "few", "hole")},
        **{given: {"advantages": given} for given in ("odd", "none")},
        "first": {"advantages": "first", **beta},
        "odd-run": {"advantages": "odd", **beta},
    }
    cases = [case(name, **fields) for name, fields in kinds.items()]
    at_0 = [case(f"{n}-0", optim={"zero_stage": 0}, **kinds[n]) for n in ("uneven", "few", "first", "none")]
    faults = [case(fault, fault=fault, **kinds["first"]) for fault in ("unset", "never")]
    return cases + at_0 + faults


def sharded() -> list[Case]:
    """Cases of the default stage at stage 3, and more of what makes processes wait for each other's layers."""
    plain = [c for c in matrix() + trouble() if not (c["config"].get("optim") or c.get("fault"))]
    cases = [c for c in plain if "loss" not in c["name"]] + [
        case("top-entropy", set="uneven", algorithm={"top_entropy_quantile": 0.5}),
        case("checkpointed", set="uneven", packs="many", optim={"gradient_checkpointing": True}),
        case("lora-checkpointed", lora=3, set="few", optim={"gradient_checkpointing": True}),
        # only a blank image gives text a gradient in the first layers
        case("lora-vision", lora=3, set="apart", vision=True),
        case("tower", trains=r"visual\.", packs="many"),
        case("tower-and-end", trains=r"visual\.|layers\.2\.", set="apart"),
    ]
    at_3 = [merged(c["config"], {"optim": {"zero_stage": 3}}) for c in cases]
    return [{**c, "name": f"{c['name']}-3", "config": config} for c, config in zip(cases, at_3, strict=True)]


@pytest.fixture(scope="module")
def launched(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """Runs cases on some processes: by name, what came of each on every process."""

    def run(family: str, world: int, cases: tuple[Case, ...]) -> Results:
        folder = tmp_path_factory.mktemp(f"{family}-{world}")
        (folder / "cases.json").write_text(json.dumps(cases))
        arguments = (models[family], folder / "cases.json", folder)
        codes = processes.launch(Path(updates.__file__), world, arguments, folder / "output")
        assert codes == [0] * world, processes.outputs(folder / "output", world)

        def results(name: str) -> list[dict[str, Any]]:
            return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(world)]

        return {case["name"]: results(case["name"]) for case in cases}

    return run


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> Callable[[str, Case], dict[str, Any]]:
    """The same step in this process: one pack, no DeepSpeed."""

    @cache
    def kept(family: str, key: str) -> dict[str, Any]:
        return updates.run(models[family], json.loads(key), Ranks())

    def run(family: str, case: Case) -> dict[str, Any]:
        config = json.loads(json.dumps(case["config"]))
        config.setdefault("optim", {}).update(zero_stage=2, offload_optimizer=False)
        plain = {**case, "config": config, "packs": "one", "name": "", "fault": None}
        return kept(family, json.dumps(plain, sort_keys=True))

    return run


def check(case: Case, results: list[dict[str, Any]], want: Mapping[str, Any]) -> None:
    """Each process's update, norms and metrics are those of one process, and ZeRO's gradients in one order."""
    optim, world_of_one = case["config"].get("optim", {}), len(results) == 1
    moved = {name: change for name, change in want["update"].items() if change.norm() > 0}
    still = want["update"].keys() - moved.keys()
    moved = {name: change for name, change in moved.items() if not is_rounding(name)}
    for got in results:
        for name, change in moved.items():
            distance = updates.far(got["update"], {name: change})[0]
            assert distance <= limit_of(name), (case["name"], name, distance)
        assert not any(bool(got["update"][n].any()) for n in still)
        assert got["metrics"]["loss"] == pytest.approx(want["metrics"]["loss"], rel=1e-4, abs=1e-4)
        for name in want["metrics"].keys() & {"entropy", "twin_view/kl", "twin_view/share"}:
            assert got["metrics"][name] == pytest.approx(want["metrics"][name], rel=1e-4)
        for mine, theirs in zip(got["records"], want["records"], strict=True):
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            assert mine["update_norm"] == pytest.approx(theirs["update_norm"], rel=1e-4)
            assert mine["live_tokens"] == theirs["live_tokens"] > 0
            assert update_happens(UpdateRecord(**mine)) is None
        # as many backward passes everywhere, and in each of them the gradients in one order where ZeRO reads them
        assert len(got["order"]) == len(results[0]["order"]) > 0
        assert got["reads_order"] or optim.get("zero_stage", 2) in (0, 3) or world_of_one
        if got["reads_order"]:
            assert {tuple(names) for names in got["order"]} == {tuple(results[0]["order"][0])}


def check_all(cases: list[Case], world: int, launched: Any, alone: Any) -> Results:
    results: Results = launched("qwen2_5_vl", world, tuple(cases))
    for each in cases:
        found = results[each["name"]]
        if each.get("fault"):
            for got in found:
                message = update_happens(UpdateRecord(**got["records"][0]))
                count = 0 if each["fault"] == "never" else len(got["order"])
                assert message is not None
                assert message.startswith(f"{count} backward passes of this update were")
        elif each.get("advantages") == "none":
            for got in found:  # all pruned: no process steps, none waits
                assert not got["order"] and not got["records"][0]["stepped"]
                assert not any(bool(change.any()) for change in got["update"].values())
        else:
            check(each, found, alone("qwen2_5_vl", each))
    return results


LONG = (
    "sgd-0", "adamw-1", "loss-dr", "loss-lu", "masked", "iterated-0", "iterated-2", "offloaded", "qlora-off",
)  # fmt: skip
"""Starts of the names of cases that the long test on two processes has; the short one has the others."""


def is_long(case: Case) -> bool:
    return case["name"].startswith(LONG) or case["name"].endswith("-0")


@pytest.mark.slow
@pytest.mark.field_bug("last-micro-batch", "text-rank")
def test_two_processes_make_the_update_of_one(launched: Any, alone: Any) -> None:
    results = check_all([c for c in matrix() + trouble() + sharded() if not is_long(c)], 2, launched, alone)
    for name, packs in (("sgd-2-one", 2), ("sgd-2-many", 16)):
        metrics = results[name][0]["metrics"]
        counts = [metrics[f"learner/{what}"] for what in ("packs", "prompts_run", "images_encoded")]
        assert counts == [packs, 4, 4]


@pytest.mark.long
def test_the_update_does_not_depend_on_the_processes(launched: Any, alone: Any) -> None:
    check_all([c for c in matrix() + trouble() + sharded() if is_long(c)], 2, launched, alone)


@pytest.mark.long
def test_four_processes_make_the_update_of_one(launched: Any, alone: Any) -> None:
    """What the number of processes touches: how rows, packs and states are dealt, and what makes processes differ."""
    dealt = ("sgd-2-many", "sgd-3", "clipped-3", "lora", "tower", "uneven", "few", "hole", "first")
    cases = [c for c in matrix() + trouble() + sharded() if c["name"].startswith(dealt) and not is_long(c)]
    check_all(cases, 4, launched, alone)


@pytest.mark.long
def test_other_families_on_two_processes(models: dict[str, Path], launched: Any, alone: Any) -> None:
    """Those whose modules are others than Qwen2.5-VL's and SmolVLM's, in one start of the processes."""
    families = {"qwen3_5": "videos", "qwen3_5_moe": "apart", "gemma3": "apart", "internvl": "videos"}
    cases = tuple(
        case(f"{f}-{stage}", set=rows, model=str(models[f]), optim={"zero_stage": stage})
        for f, rows in families.items()
        for stage in (2, 3)
    )
    results = launched("qwen2_5_vl", 2, cases)
    for each in cases:
        check(each, results[each["name"]], alone(each["name"][:-2], each))


@pytest.mark.long
def test_bfloat16_with_fp32_masters_on_two_processes(launched: Any, alone: Any) -> None:
    """Gradients are bfloat16 and their sums are not: 16 packs give the update of one, within its rounding."""
    cases = tuple(
        case(f"bf16-{stage}-{packs}", set="flat", packs=packs, optimizer="adamw", dtype="bfloat16", **lora)
        | {"config": {"optim": {"zero_stage": stage, "learning_rate": 1e-2}}}
        for stage, packs, lora in (
            (0, "many", {}), (2, "one", {}), (2, "many", {}), (3, "many", {}), (3, "one", {"lora": 3}),
        )
    )  # fmt: skip
    results = launched("qwen2_5_vl", 2, cases)
    for each in cases:
        want = alone("qwen2_5_vl", each)
        for got, record in ((r, r["records"][0]) for r in results[each["name"]]):
            assert record["grad_norm"] == pytest.approx(want["records"][0]["grad_norm"], rel=0.02)
            assert record["update_norm"] == pytest.approx(want["records"][0]["update_norm"], rel=0.02)
            total = torch.cat([t.flatten() for t in want["update"].values()])
            mine = torch.cat([t.flatten() for t in got["update"].values()])
            assert torch.cosine_similarity(mine, total, 0) > 0.98
