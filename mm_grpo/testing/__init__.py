"""For tests, ours and users'.

tiny_models (random models of every family, without a download), tiny_recipes (their configs and processors),
fake_engines (a rollout engine with its own copy of the weights, and the faults of a remote one), small_bases (the small
models that recipes for the CPU start from: their parts and the supervised steps that make them).
"""
