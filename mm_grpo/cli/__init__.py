"""The command `mm-grpo`, thin over the Python API.

main       the application, and the exit code of each error
train      `train`
serve      `serve`, and `train --serve`
evaluate   `eval`
preflight  `check`, `doctor`, `estimate`
export     `export`, `ask`
view       `view`
reference  `config`, `env`
rewards    `rewards`, `rewards NAME`, `rewards try NAME`
recipes    `recipes`, `init`
configs    the config that a command runs: files, layers, fields
convert    `convert`
imports    torch, transformers and what stands on them, imported without garbage collection
unexpected the one line for what no command expects, and its traceback
help       examples in every help, `--version`, advice on options that are fields
"""

from mm_grpo.cli.main import main

__all__ = ["main"]
