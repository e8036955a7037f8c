"""Rewards: plain functions that score completions.

- `spec.py`       what a reward is, read from its function's parameters
- `registry.py`   rewards by name: the `@reward` decorator, the table of built-ins
- `resolve.py`    from a config entry (name, file, module, mapping, callable) to a spec
- `options.py`    how a reward is run: isolation, time-out, its rows, gates, errors masked or not
- `outcome.py`    the gate of a reward that says what is right: the others pay nothing where it is no success
- `required_columns.py` what rewards ask of a dataset's columns, also those that are for some rows only
- `scorer.py`     `Scorer`: all rewards over one step's completions; totals, raw parts, metrics
- `batch.py`      the rows of a step, and what functions log
- `call.py`       calls of one function, and the scores and faults that come back
- `arguments.py`  the arguments of a call by name
- `scores.py`     what is a score, and what is wrong with other values
- `thinking.py`   completions without their thinking
- `plain.py`      plain functions, in the trainer's process
- `async_runner.py` async and isolated rewards, on event loops in threads
- `streaming_rewards.py` rewards that begin while other completions are still being sampled
- `isolation.py`  isolated rewards, in worker processes that can be killed; `worker.py` what runs in those
- `builtins/`     the rewards that ship, one file each

To add a reward of your own, decorate a function anywhere and name it in the config:

    @reward("short", weight=0.5)
    def short(completion: str) -> float:
        return 1.0 if len(completion) < 100 else 0.0

    rewards: [my_rewards.py:short]

Nothing here imports torch, transformers or datasets.
"""

from mm_grpo.rewards.batch import TrainerState
from mm_grpo.rewards.registry import get, names, reward
from mm_grpo.rewards.resolve import entry_point_names, resolve_entries, resolve_entry
from mm_grpo.rewards.scorer import Scorer, Scores
from mm_grpo.rewards.spec import RewardSpec

__all__ = [
    "RewardSpec",
    "Scorer",
    "Scores",
    "TrainerState",
    "entry_point_names",
    "get",
    "names",
    "resolve_entries",
    "resolve_entry",
    "reward",
]
