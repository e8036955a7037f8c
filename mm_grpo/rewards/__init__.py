"""Rewards: plain functions that score completions.

- `registry.py`  the `@reward` decorator, the dict of rewards, `RewardSpec`
- `resolve.py`   from a config entry (name, file, module, mapping, callable) to a spec
- `scoring.py`   `Scorer`: all rewards over one step's completions; totals, raw parts, metrics
- `compose.py`   sums: `0.8 * get("iou") + 0.2 * get("format")`
- `places.py`    files and modules imported; where another process finds a function
- `policy.py`    how a reward is run: isolation, time-out, retries, gates, clipping, errors masked or not
- `calls.py`     one call of one function: its arguments by name, the messages of what goes wrong
- `checks.py`    what counts as a score
- `running.py`   a reward's calls made in the trainer's process or in workers; `loop.py` the async ones
- `pool.py`      worker processes, with `scheduling.py`, `process.py` and `worker.py` (what runs in them)
- `builtins/`    the rewards that ship, one file each

To add a reward of your own, decorate a function anywhere and name it in the config:

    @reward("short", weight=0.5)
    def short(completion: str) -> float:
        return 1.0 if len(completion) < 100 else 0.0

    rewards: [my_rewards.py:short]

Nothing here imports torch, transformers or datasets.
"""

from mm_grpo.rewards.calls import TrainerState
from mm_grpo.rewards.registry import RewardSpec, get, names, reward
from mm_grpo.rewards.resolve import describe, entry_point_names, resolve_entries, resolve_entry
from mm_grpo.rewards.scoring import Scorer, Scores

__all__ = [
    "RewardSpec",
    "Scorer",
    "Scores",
    "TrainerState",
    "describe",
    "entry_point_names",
    "get",
    "names",
    "resolve_entries",
    "resolve_entry",
    "reward",
]
