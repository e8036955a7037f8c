"""A trained model: found, evaluated, asked, written for transformers, sent to the Hub.

source    which model is meant by a run's folder, a checkpoint's, a model folder or a name on the Hub
model     a checkpoint's weights put into the model that they belong to
evaluate  `mm-grpo eval`: the sets of a config answered by it, with pass@k, by a column, blind
table     those results on the terminal and as JSON
ask       `mm-grpo ask`: one question
export    `mm-grpo export`: a folder that is written beside, proved, renamed
proof     the written folder, loaded with transformers and peft alone, against the learner's log-probs
prompts   prompts and completions of the run, to compare on
card      README.md of an export: what the run did, in the figures that it left
hub       an export on the Hugging Face Hub; `push_to_hub` of a trainer

What one evaluation computes is in rollout/evaluate.py, and what a run's evaluations are in run/evaluations.py.
"""
