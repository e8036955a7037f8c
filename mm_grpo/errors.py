"""The errors that mm_grpo raises on purpose, and the exit code of each.

A `UserError` is a mistake in a config, a dataset, a reward or a command: the command line prints its
message alone and exits with 2. A `GuardStop` is a run that stopped itself (exit 3). Every message
names the field or the row, the value, what is legal and what to do. Anything else that escapes is a
fault of ours, keeps its traceback and exits with 1.
"""


class UserError(Exception):
    """A mistake that the user can mend. Exit code 2."""


class ConfigError(UserError):
    """A field of the config is unknown, missing, out of range or at odds with another."""


class DataError(UserError):
    """A dataset or one of its rows cannot be used."""


class RewardError(UserError):
    """A reward is unknown, raised, or answered with something that is not a score."""


class EngineError(RuntimeError):
    """The rollout engine failed where neither config nor row is to blame; the cause is chained. Exit code 1."""


class GuardStop(Exception):
    """A guard stopped the run. Exit code 3."""
