"""vLLM as a rollout engine.

engine     VLLMEngine: the protocol over vLLM in the trainer's process
internals  requests, weight reload, caches and sleep of a running vLLM: all that knows its inside
adapters   the learner's adapters in vLLM's own LoRA layers
four_bits  the learner's base in four bits, run in place by vLLM's layers
read_back  what its layers hold of the tensors that were sent, here and in servers
requests   what is asked of vLLM and checked of its answers, by this engine and by served ones
weight_names   names of weights that transformers has changed and vLLM does not know yet
launch     starting vLLM in this process, and leaving the process as it was
"""
