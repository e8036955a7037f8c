"""`mm-grpo eval`: the evaluation sets of a config answered by a model, a checkpoint or a run, and nothing trained.

    weights   which weights `--model` means
    results   the evaluation itself: scores, pass@k, by a column, the blind control
    table     the results on the terminal and as JSON

What one evaluation computes is in rollout/evaluate.py, what a run's evaluations are in run/evaluations.py.
"""
