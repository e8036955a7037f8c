"""`python -m mm_grpo.cli`, which is what launchers start."""

from mm_grpo.cli.main import main

if __name__ == "__main__":
    main()
