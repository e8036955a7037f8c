"""Checks before a run. Nothing here trains a model that is saved.

check         `mm-grpo check`: make every row into a prompt, call every reward
gold_answers  rewards on right and on wrong answers
gold_text     a row's right answer
gold_warnings  golds that look like no answer
understood    the first row of a source as a run understands it, in lines for the terminal
pass_rates    `mm-grpo check --pass-rate`: how often the model answers rows right
warm_answers  answers that `mm-grpo warm` teaches
doctor        `mm-grpo doctor`: compare engine and learner before and after a real update
memory        estimate of one process's device memory
estimate      `mm-grpo estimate`: the same from the model's config, and settings that make a run fit
out_of_memory  refuse runs that are too large for their GPU; explain a full GPU
from_folder   `mm-grpo init --from`: a first config and its rows from a folder of pictures
smoke         `--smoke`: a config that runs on any CPU in seconds
"""
