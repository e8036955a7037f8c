"""A trained model: find, evaluate, ask, export and upload it.

source    find the model that a path or a name means
model     load a checkpoint's weights into its base model
evaluate  `mm-grpo eval`: answer the evaluation sets, with pass@k, by a column, blind
table     results of an evaluation on the terminal and as JSON
warm_mark what a warm start taught a model, for the runs that begin with it
ask       `mm-grpo ask`: one question
export    `mm-grpo export`: write a temporary folder, prove it, rename it
proof     compare an exported folder, loaded with plain transformers and peft, with the learner's log-probs
card      README.md of an export, with the run's figures
hub       upload to the Hugging Face Hub; `push_to_hub` of a trainer

One evaluation is computed in rollout/evaluate.py, a run's evaluations in run/evaluations.py.
"""
