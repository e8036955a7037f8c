"""What a resume refuses beside other fields and weights (checkpoint.py): other rows, other sets, an end behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_grpo.data.dataset import Dataset
from mm_grpo.data.fingerprint import fingerprint
from mm_grpo.errors import ConfigError
from mm_grpo.run.checkpoint import Checkpoint


def rows_of(train: Dataset, eval_sets: Mapping[str, Dataset]) -> dict[str, Any]:
    """The fingerprints of the training rows and of the evaluation sets, by the field of `data` that names them."""
    return {"train": fingerprint(train), **{f"eval.{name}": fingerprint(s) for name, s in eval_sets.items()}}


def refuse_another_run(found: Checkpoint, rows: Mapping[str, Any], max_steps: int) -> None:
    """ConfigError when the checkpoint `found` is not of a run over these `rows` and of at most `max_steps` steps.

    Also when the evaluation sets are others, or in another order: the first is the headline, and before and after
    are compared set by set.
    """
    sets, known = [n.removeprefix("eval.") for n in rows if n != "train"], list(found.extra["before"])
    if sets != known:
        raise ConfigError(
            f"data.eval: the checkpoint '{found.path}' was made with the sets {', '.join(known) or 'none'}, and "
            f"these are {', '.join(sets) or 'none'}; before and after would not compare. Put them back, in that order"
        )
    for name, then in found.extra.get("rows", {}).items():
        now = rows[name]
        if now != then:
            what = f"{then['rows']} then, {now['rows']} now"
            what += ", of other contents" if now["rows"] == then["rows"] else ""
            raise ConfigError(
                f"data.{name}: the checkpoint '{found.path}' was made with other rows ({what}); put them back, or "
                "start a new run"
            )
    if found.step > max_steps:
        raise ConfigError(
            f"run.max_steps = {max_steps}: the checkpoint '{found.path}' has {found.step} finished steps; raise it to "
            "at least that, or start a new run"
        )
