"""From a checkpoint to a model that plain transformers loads, and answers from either.

prompts   prompts and completions of the run, to compare on
proof     the written folder, loaded with transformers and peft alone, against the learner's log-probs
card      README.md of an export: what a run did, in the figures that it left
write     an export: written beside, proved, renamed
hub       the same, sent to the Hugging Face Hub
saving    `save_model`, `save_adapter` and `push_to_hub` of the trainer
ask       one question to a run, an export or a model folder

Which checkpoint is meant, and its weights in a model: trained/.
"""
