"""The learner: groups in, an updated model out.

- `policy.py`: loading the model that is trained.
- `pack.py`: groups laid out as shared-prefix rows, and the plan that fills packs.
- `forward.py`: the one module whose forward takes a pack.
- `logprobs.py`: chunked log-probabilities and entropies.
- `distributed.py`: which of how many processes this is, and what they tell each other.
- `optimizer.py`: AdamW, schedule, clipping, fp32 master weights, whole in each process.
- `zero.py`: the same with its state shared out over the processes (DeepSpeed ZeRO-1 and ZeRO-2).
- `state.py`: the state on disk, by parameter name, for any number of processes.
- `objective.py`: the loss of a pack, from the pure functions of `algorithm`.
- `learner.py`: one step's updates.
"""
