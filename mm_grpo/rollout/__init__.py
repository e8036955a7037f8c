"""Rollout: prompts in, completions out, each generation with its own seed.

    collect              the groups of a step: prompts, completions, rewards, advantages; early scoring
    evaluate             how well the model answers a set of rows, with its images and without
    eval_metric          what evaluations are judged by, with intervals; pass@k
    success              which completions are a success; advantages of groups without one
    group_metrics        metrics of scored groups, and the same by the column `task`
    prompts              which prompts a step asks, and what happens to one that is too long
    prefetch             prompts of the next rows, made in background threads
    seeds                the seed law, and nothing else
    pipeline             when the groups of a step are made: in it, or ahead of it while the learner works
    turns                conversations of several turns over any engine, with tools and environments
    conversation         one of them, as a growing list of tokens
    engine               the base class of engines and of their streams, the request, the check of answers
    transformers_engine  the embedded engine over the learner's own model, with continuous batching
    decode_cache         keys and values of the rows that decode together, and their attention
    token_sampling       drawing tokens, each row from its own noise
    vllm                 vLLM in the trainer's process
    served               vLLM servers in other processes, reached over HTTP
    engine_limits        what vLLM is started for where the config leaves it to the rows
    weights              which tensors an engine is due, and the digests that prove what arrived

A new engine is one file with a subclass of `engine.RolloutEngine`, and lines in `build.ENGINES` and
`config/engine_facts.py`.
"""
