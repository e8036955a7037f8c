"""The learner: groups in, an updated model out.

- `policy.py`: loading the model that is trained.
- `pack.py`: groups laid out as shared-prefix rows, and the plan that fills packs.
- `forward.py`: the one module whose forward takes a pack.
- `logprobs.py`: chunked log-probabilities and entropies.
- `optimizer.py`: AdamW, schedule, clipping, fp32 master weights.
- `objective.py`: the loss of a pack, from the pure functions of `algorithm`.
- `learner.py`: one step's updates, in one process.
"""
