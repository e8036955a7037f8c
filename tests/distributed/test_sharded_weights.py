"""What leaves a learner at ZeRO stage 3 is what leaves a whole one, and no process holds much more than its share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sharded_weights
import torch
import updates
from helpers import processes, tiny
from safetensors.torch import load_file
from test_zero_updates import Results, case
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForImageTextToText

from mm_grpo.distributed.ranks import Ranks

pytestmark = pytest.mark.slow

LAYERS = 8
"""Of the deep model: one layer is small beside a process's share of all."""
KINDS = ("tied", "untied", "lora")


def deep(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    config = AutoConfig.from_pretrained(model)
    config.text_config.num_hidden_layers, config.text_config.layer_types = LAYERS, ["full_attention"] * LAYERS
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def results(models: dict[str, Path], root: Path) -> Results:
    """By case, what came of it in one process, and in each of two."""
    model = str(models["qwen2_5_vl"])
    untied = str(tiny.build("qwen2_5_vl", root / "untied-model", tie=False))
    large = {"set": "text", "model": str(deep(models["qwen2_5_vl"], root / "deep-model")), "bytes": True}
    kinds: dict[str, dict[str, Any]] = {
        "tied": {"optimizer": "adamw"}, "untied": {"model": untied, "optimizer": "adamw"},
        "lora": {"lora": 3, "optimizer": "adamw"}, "deep": large, "deep-lora": {**large, "lora": 4},
    }  # fmt: skip
    shared = {"optim": {"zero_stage": 3, "learning_rate": 1e-2}, "algorithm": {"beta": 0.1}}
    common = {"set": "uneven", "model": model, **shared}
    cases = [case(name, **{**common, **kind}) for name, kind in kinds.items()]
    found: Results = {}
    for each in cases:
        function = sharded_weights.bytes_held if each.get("bytes") else sharded_weights.run
        found[each["name"]] = [function(Path(each["model"]), each, Ranks(), root)]
    (root / "cases.json").write_text(json.dumps(cases))
    program, arguments = Path(sharded_weights.__file__), (model, root / "cases.json", root)
    codes = processes.launch(program, 2, arguments, root / "output", deadline=120)
    assert codes == [0, 0], processes.outputs(root / "output", 2)
    for name, one in found.items():
        one += [torch.load(root / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]
    return found


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert not [name for name, tensor in want.items() if not torch.equal(got[name], tensor)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_process_sends_the_whole_models_tensors(results: Results, kind: str) -> None:
    alone, *both = results[kind]
    assert not torch.equal(*(torch.cat([t.flatten() for t in alone[n].values()]) for n in ("start", "named")))
    pairs = {"start": "start", "in block": "named", "put back": "start", "named": "named"}
    for mine in both:
        for name, of_one in pairs.items():
            assert_equal(mine[name], alone[of_one])
        assert mine["digest"] == alone["digest"] and bool(mine["digest"]) == (kind == "lora")
        assert updates.far(mine["update"], {n: w for n, w in alone["update"].items() if w.any()})[0] <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_passes_without_gradients_give_one_processs_values(results: Results, kind: str) -> None:
    alone, first, second = (found["passes"] for found in results[kind])
    assert (first | second).keys() == alone.keys() and len({key[1] for key in alone}) == 5
    assert {key[1] for key in first.keys() & second.keys()} == {"score"}
    for found in (first, second):
        for key, values in found.items():
            assert tree_leaves(values) == pytest.approx(tree_leaves(alone[key]), abs=1e-5), key


@pytest.mark.parametrize("kind", KINDS)
def test_plain_transformers_loads_what_is_saved(results: Results, root: Path, kind: str) -> None:
    alone, folder = results[kind][0], root / "two" / kind
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    assert_equal(dict(model.named_parameters(remove_duplicate=False)), alone["named"])
    if kind == "lora":
        one = root / "alone" / kind / "adapter"
        assert_equal(*(load_file(f / "adapter_model.safetensors") for f in (folder / "adapter", one)))
        config, same = (f / "adapter_config.json" for f in (folder / "adapter", one))
        assert config.read_text() == same.read_text()


def test_no_weight_of_the_base_is_gathered_for_factors(results: Results) -> None:
    alone, *both = results["lora"]
    for mine in both:
        assert mine["stays"] and mine["lost"] is None and not alone["stays"] and alone["lost"] is not None
        assert_equal(mine["factors"], {n: t for n, t in alone["factors"].items() if ".lora_" in n})
        assert mine["sizes"] == [t.numel() for t in mine["factors"].values()]


def test_an_error_of_one_process_leaves_none_waiting(results: Results) -> None:
    """Of the first one's disk, and of the second one's rows."""
    _, first, second = results["lora"]
    assert first["errors"] == ["NotADirectoryError", "ConfigError", "ConfigError"]
    assert second["errors"] == ["", "", "ConfigError"]


@pytest.mark.parametrize("kind", ["deep", "deep-lora"])
def test_a_process_holds_its_share_and_a_layer(results: Results, kind: str) -> None:
    """Less than one process alone by the other's share: of the model, and if all weights learn of its copied reference
    and two states (gradients and samples of weights in a step, AdamW's means in a checkpoint). Plus one layer and a
    weight of the next one, which is whole in a step."""
    alone, *both = results[kind]
    share = alone["layers"] // 2
    assert 2 * alone["largest"] + alone["weight"] < share
    for mine in both:
        for phase in ("sync", "save", "step", "checkpoint"):
            learning, steps = kind == "deep", phase in ("step", "checkpoint")
            states, layers = 1 + learning + 2 * (learning and steps), 1 + (phase == "step")
            # one process alone merges all layers before it saves them
            most = alone["sync" if phase == "save" else phase]
            room = layers * alone["largest"] + alone["weight"]
            assert mine[phase] <= most - states * share + room, phase
