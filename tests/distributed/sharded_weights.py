"""Run as a script in two processes, or called in one: what leaves a learner whose weights are shared out.

The cases are those of `updates.build`. One process makes an update and a checkpoint in ROOT/alone/CASE, and two take
their weights from it. What comes of each case goes to ROOT/CASE-RANK.pt.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import updates
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mm_grpo.distributed import ranks as distributed
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner import quantization, shards, sight
from mm_grpo.learner.forward_pass import states_on_host
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.minibatch import make_items
from mm_grpo.learner.state import frozen_digest
from mm_grpo.run.checkpoint import Checkpoints
from mm_grpo.run.folder import RunFolder, Save
from mm_grpo.run.paths import RunPaths


def named(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.named_tensors()}


def passes(learner: Learner, ranks: Ranks) -> dict[Any, Any]:
    """Values of passes without gradients, by set, pass and slot."""
    found: dict[Any, Any] = {}
    for rows in ("uneven", "few", "apart"):
        every = updates.make_groups(learner.processor, updates.SETS[rows], "all", 1.0)
        groups = [g for g in every if g.slot % ranks.world == ranks.rank]
        answered, slots = [(g.prompt, g.completions) for g in groups], [g.slot for g in groups]
        for read in (learner.current_logprobs, learner.reference_logprobs):
            found |= {(rows, read.__name__, s): v for s, v in zip(slots, read(answered), strict=True)}
        ids = [c.token_ids for c in every[0].completions]
        for options in ({}, {"as_sampled": True}, {"as_sent": True}):
            found[rows, "score", *options] = learner.score(every[0].prompt, ids, **options)
        most = learner.config.optim.max_tokens_per_pack
        found |= {(rows, "sight", s.slot): s.tokens for s in sight.measure(groups, learner, most, ranks)}
        items = make_items(groups, learner.config.algorithm)
        for index, states in learner.run_pass(items, states_on_host).items():
            found[rows, "states", slots[items[index].group], items[index].token_ids] = states.tolist()
    return found


def factors(learner: Learner) -> dict[str, Any]:
    """The tensors that are sent if all adapters go as factors, and the sizes of what is gathered for them."""
    sizes: list[int] = []
    learner.use_factors(learner.adapted_layers)
    quantization.gathered = lambda weight: sizes.append(weight.numel()) or shards.gathered(weight)  # type: ignore
    lost, tensors = learner.merge_lost(), named(learner)
    quantization.gathered = shards.gathered
    return {"stays": learner.base_stays, "lost": lost, "factors": tensors, "sizes": sizes}


def errors(learner: Learner, answered: list[Any], ranks: Ranks, file: Path) -> list[str]:
    """Classes of the errors of three calls of which one process cannot do its part, "" for none."""
    file.touch()
    long = [(prompt, [replace(c, token_ids=(50,) * 9999) for c in done]) for prompt, done in answered]
    folders: dict[str, Save] = {"model": learner.save, "adapter": learner.save_adapter}
    calls: list[Callable[[], object]] = [
        lambda: learner.save(file / "model" if ranks.first else None),
        lambda: RunFolder(file).replace_folders(folders, first=ranks.first),
        lambda: learner.current_logprobs(answered if ranks.first else long),
    ]
    found = [""] * len(calls)
    for number, call in enumerate(calls):
        try:
            call()
        except Exception as error:
            found[number] = type(error).__name__
    return found


def run(path: Path, case: Mapping[str, Any], ranks: Ranks, root: Path) -> dict[str, Any]:
    """What leaves the learner of a case: tensors, values of passes, files in ROOT/alone/CASE or ROOT/two/CASE."""
    learner, groups = updates.build(path, case, ranks)
    alone, folder = (root / of / case["name"] for of in ("alone", "alone" if ranks.world == 1 else "two"))
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(RunPaths(alone), learner, learner.config)
    found: dict[str, Any] = {"start": named(learner)}
    if ranks.world == 1:
        learner.update(groups)
        checkpoints.save(1, {})
    else:
        with checkpoints.weights_of(1):
            found["in block"] = named(learner)
        found["put back"] = named(learner)
        checkpoints.load(checkpoints.newest())  # type: ignore[arg-type]
    found |= {
        "named": named(learner),
        "digest": frozen_digest(learner.model),
        "passes": passes(learner, ranks),
    }
    learner.save(folder / "model" if ranks.first else None)
    if "lora" in case:
        learner.save_adapter(folder / "adapter" if ranks.first else None)
        if ranks.world > 1:
            answered = [(g.prompt, g.completions) for g in groups]
            found["errors"] = errors(learner, answered, ranks, root / f"file-{ranks.rank}")
        found |= factors(learner)
    before = updates.weights_of(learner)
    learner.update(groups)
    return found | {"update": {n: w - before[n] for n, w in updates.weights_of(learner).items()}}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the memory of tensors that was made in the block and lives."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.storages = 0, weakref.WeakValueDictionary[int, Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):  # subclasses wrap the one that has the memory
                storage = getattr(tensor, "_local_tensor", getattr(tensor, "elem", tensor)).untyped_storage()
                self.storages[id(storage)] = storage
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages.values()))
        return result

    def peak_of(self, call: Callable[[], object]) -> int:
        self.peak = 0
        call()
        return self.peak


def bytes_held(path: Path, case: Mapping[str, Any], ranks: Ranks, root: Path) -> dict[str, int]:
    """The most bytes of tensors that this process holds in each phase; those of all layers, and of the largest ones."""
    with LiveBytes() as live:
        learner, groups = updates.build(path, case, ranks)
        updates.loaded.cache_clear()
        family, folder = learner.processor.family, root / case["name"]
        folder.mkdir(exist_ok=True)
        layers = [*family.language_model(learner.model).layers, learner.model.get_input_embeddings()]
        sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]
        checkpoints = Checkpoints(RunPaths(folder), learner, learner.config)
        phases: dict[str, Callable[[], object]] = {
            "sync": lambda: [0 for _ in learner.named_tensors()],
            "save": lambda: learner.save(folder / "model" if ranks.first else None),
            "step": lambda: learner.update(groups),
            "checkpoint": lambda: checkpoints.save(1, {}),
        }
        peaks = {name: live.peak_of(call) for name, call in phases.items()}
    weight = max(p.numel() * p.element_size() for p in layers[0].parameters())
    return peaks | {"layers": sum(sizes), "largest": max(sizes), "weight": weight}


def main(path: str, cases: str, root: str) -> None:
    ranks = distributed.start("cpu", deadline=30.0)
    for case in json.loads(Path(cases).read_text()):
        function = bytes_held if case.get("bytes") else run
        result = function(Path(case.get("model", path)), case, ranks, Path(root))
        torch.save(result, Path(root) / f"{case['name']}-{ranks.rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
