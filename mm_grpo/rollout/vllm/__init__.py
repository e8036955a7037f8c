"""vLLM as a rollout engine.

engine     VLLMEngine: the protocol over vLLM in the trainer's process
internals  requests, weight reload, caches and sleep of a running vLLM: all that knows its inside
launch     starting vLLM in this process, and leaving the process as it was
"""
