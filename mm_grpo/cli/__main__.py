"""`python -m mm_grpo.cli`, which is what launchers start."""

import os
import sys

from mm_grpo.cli.main import main
from mm_grpo.import_path import library_first

if __name__ == "__main__":
    sys.path[:] = library_first([*sys.path, ""], os.getcwd())
    main()
