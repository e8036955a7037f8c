"""Rollout: prompts in, completions out, each generation with its own seed.

- `prompting.py`: which prompts a step asks, and what happens to one that is too long.
- `seeds.py`: the seed law, and nothing else.
- `engine.py`: the protocol that every engine keeps, and the request it is sent.
- `build.py`: the engine that a config asks for.
- `transformers_engine.py`: the embedded engine, a decode loop over the learner's own model.

A new engine is one file that keeps the protocol of `engine.py`.
"""
