"""vLLM as a rollout engine.

engine         VLLMEngine: vLLM in the trainer's process as a rollout engine
internals      requests, weight reload, caches and sleep of a running vLLM: all that knows its inside
adapters       the learner's adapters in vLLM's own LoRA layers
four_bits      the learner's base in four bits, run in place by vLLM's layers
read_back      digests of the tensors that vLLM's layers hold after an update, here and in servers
requests       requests to vLLM and checks of its answers for this engine and for servers
model_patches  names of weights that vLLM does not know yet, and a fault of its LLaVA-OneVision
launch         starting vLLM in this process, and leaving the process as it was
"""
