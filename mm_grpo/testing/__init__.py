"""For tests, ours and users'.

tiny_models (random models of every family, without a download), tiny_recipes (their configs and processors),
fake_engines (a rollout engine with its own copy of the weights, and the faults of a remote one).
"""
