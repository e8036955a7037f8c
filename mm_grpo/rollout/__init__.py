"""Rollout: prompts in, completions out, each generation with its own seed.

    collect              the groups of a step: prompts, completions, rewards, advantages
    evaluate             how often the model answers a set of rows right
    tasks                metrics by the column `task`
    prompts              which prompts a step asks, and what happens to one that is too long
    prefetch             prompts of the next rows, made in background threads
    seeds                the seed law, and nothing else
    turns                conversations of several turns over any engine, with tools and environments
    conversation         one of them, as a growing list of tokens
    engine               the protocol that every engine keeps, the request it is sent, the check of its answers
    transformers_engine  the embedded engine, a decode loop over the learner's own model
    vllm                 vLLM in the trainer's process
    engine_limits        what vLLM is started for where the config leaves it to the rows
    weights              which tensors an engine is due, and the digests that prove what arrived

A new engine is one file that keeps the protocol of `engine.py`, and a line in `build.ENGINES`.
"""
