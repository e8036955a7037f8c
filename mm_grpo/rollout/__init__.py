"""Rollout: prompts in, completions out, each generation with its own seed.

    seeds                the seed law, and nothing else
    prompts              the prompts of a step; prompts that are too long are refused or dropped
    prefetch             prompts of the next rows, made in background threads
    runner               prompts → requests → stream → groups → scores for training and evaluation
    collect              the groups of a training step, from prompts to advantages
    scored_groups        KL, rewards and advantages, as fields of groups
    pipeline             when the groups of a step are made: in it, or ahead of it while the learner works
    turns                conversations of several turns over any engine, with tools and environments
    conversation         one conversation, as a growing list of tokens
    engine               the base class of engines and of their streams, the request, the check of answers
    transformers_engine  the embedded engine over the learner's own model, with continuous batching
    decode_cache         keys and values of the rows that decode together, and their attention
    token_sampling       drawing tokens, each row from its own noise
    vllm                 vLLM in the trainer's process
    served               vLLM servers in other processes, reached over HTTP
    engine_limits        limits of prompts, and of vLLM's sequences when the config leaves them to the rows
    weights              the tensors that an engine is due, and the digests that prove what arrived

Numbers, and the file that computes them:

    group_metrics        of a training step: `reward`, `completions/*`, `turns/*`, `tools/*`, `task/{task}/*`
    success              of a completion: success or not; of a step: `advantages/phantom_share`
    eval_metric          of a completion: its value by `run.headline`; of rows: mean, 95 % interval, pass@k
    evaluate             of an evaluation set: `eval/{set}/*`, and of its blind control `eval/blind/*`

`run/evaluations.py` keeps these over a run, `trained/evaluate.py` computes them for a finished model.

A new engine is one file with a subclass of `engine.RolloutEngine`, and lines in `build.ENGINES` and
`config/engine_facts.py`.
"""
