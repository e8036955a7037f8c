"""What finds faults before a run: nothing here trains a model that is kept.

check         `mm-grpo check`: every row made into a prompt, every reward called
gold_answers  rewards on right and on wrong answers of the rows
gold_text     the right answer of a row to a reward
pass_rates    `mm-grpo check --pass-rate`: how often the model answers rows right
doctor        `mm-grpo doctor`: engine against learner, before and after a real update
memory        what one process of a run holds of its device, estimated
estimate      `mm-grpo estimate`: that, from the model's config alone, and what makes it fit
out_of_memory  runs that are larger than their GPU, refused before and explained after
smoke         `--smoke`: a config that runs on any CPU in seconds
"""
