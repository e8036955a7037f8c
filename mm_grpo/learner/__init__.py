"""The learner: groups in, an updated model out.

- `policy.py`: loading the model that is trained.
- `pack.py`: groups laid out as shared-prefix rows, and the plan that fills packs.
- `forward.py`: the one module whose forward takes a pack.
- `attention.py`, `flex.py`: attention that does not pay for what the mask forbids, on a CPU and on a GPU.
- `towers.py`: transformers' vision towers, with attention and patches in fewer calls.
- `features.py`: image features of a frozen tower, kept for the passes of a step.
- `logprobs.py`: log-probabilities and entropies, tile by tile.
- `owners.py`: values of a pack's tokens, kept by completion.
- `balance.py`: groups handed between processes before an update.
- `distributed.py`: which of how many processes this is, and what they tell each other.
- `optimizer.py`: AdamW, schedule, clipping, fp32 master weights, whole in each process.
- `zero.py`: the same with its state shared out over the processes (DeepSpeed ZeRO-1 and ZeRO-2).
- `state.py`: the state on disk, by parameter name, for any number of processes.
- `objective.py`: the loss of a pack, from the pure functions of `algorithm`.
- `report.py`: what a step did, in numbers.
- `learner.py`: one step's updates.
"""
