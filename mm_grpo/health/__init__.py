"""Guards: one failure each, with a threshold, an action and a message that names cause and remedy.

- `action.py`: what `stop`, `warn` and `off` do.
- `duplicate_completions.py`: a group repeats itself more than its own probabilities allow.
- `logp_gap.py`: engine and learner disagree about the log-probs of the same tokens.
- `update_happens.py`: the optimizer ran and nothing moved, or nothing could.

A new guard is one file with a function that returns its message or None, and its name in the
config's `run.guards`.
"""
