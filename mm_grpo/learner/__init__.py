"""The learner: groups in, an updated model out.

One step
- `learner.py`: one step's updates: minibatches, old and reference log-probs, then forward, loss, backward, optimizer.
- `learner_weights.py`: the learner's weights as engines get them and as they are saved.
- `minibatch.py`: the completions of one update, with their weights and log-probs.
- `loss.py`: the loss of a pack, from the pure functions of `algorithm`.
- `step_report.py`: the metrics of a step.
- `features/`: what may be added to the updates of a run, a file each.
- `alternate_prompts.py`: the same rows with other images, in the place of a group's prompts.
- `sight.py`: how much completions depend on their images: log-probs with their own and with another row's.

Forward
- `pack.py`: groups laid out as shared-prefix rows, and the plan that fills packs.
- `forward.py`: the one module whose forward takes a pack.
- `forward_pass.py`: one pass over the packs of a plan, with what these share; log-probs of given completions.
- `prompt_states.py`: prompts that are run once for several packs: what is kept of them, and their backward.
- `image_features.py`: image features that rows or passes share.
- `completion_batch.py`: a pack's rows cut into prompts and a batch of completions.
- `attention.py`, `flex.py`: attention that skips what the mask forbids, on a CPU and on a GPU.
- `linear_attention.py`: layers with a recurrent state, which each completion takes over from its prompt.
- `vision_attention.py`: attention of vision towers over many images, in few calls.
- `transformers_patches.py`: every change to transformers' models, with its reason.
- `logprobs.py`: log-probabilities and entropies, tile by tile.

Weights
- `model.py`: loading the model that is trained.
- `lora.py`: adapters.
- `quantization.py`: frozen weights in four bits beside them.
- `optimizer.py`: AdamW, schedule, clipping, fp32 master weights, whole in each process.
- `zero.py`: the same with its state sharded over the processes (DeepSpeed ZeRO-1 and ZeRO-2).
- `sharding.py`, `shards.py`: the weights themselves sharded over the processes (ZeRO stage 3).
- `reference.py`: the reference policy, at the start or of another path.
- `state.py`: the optimizer's state on disk, by parameter name; any number of processes reads it.
"""
