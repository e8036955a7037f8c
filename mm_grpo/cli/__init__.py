"""The command `mm-grpo`, thin over the Python API.

main       the application, and the exit code of each error
train      `train`, `warm`
serve      `serve`, and `train --serve`
preflight  `check`, `doctor`, `estimate`
trained    `eval`, `export`, `ask`
view       `view`
reference  `config`, `env`
rewards    `rewards`, `rewards NAME`, `rewards try NAME`
recipes    `recipes`, `init`, `convert`
configs    load a command's config: files, layers, fields
imports    import torch and transformers quickly and quietly
unexpected one line and a traceback for an unexpected error
help       examples in every help, `--version`, advice on options that are fields
"""

import sys

try:
    from mm_grpo.cli.main import main
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)

__all__ = ["main"]
