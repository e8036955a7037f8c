"""The command `mm-grpo`, thin over the Python API.

main       the application, and the exit code of each error
train      `train`
preflight  `check`, `doctor`
rewards    `rewards`, `rewards NAME`, `rewards try NAME`
configs    the config that a command runs; `recipes`
"""

from mm_grpo.cli.main import main

__all__ = ["main"]
