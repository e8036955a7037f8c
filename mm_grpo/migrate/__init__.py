"""Names of TRL, ms-swift, verl and EasyR1, and what they are called here.

keys       one table of foreign keys (our field, or a reason) and of foreign values; what is said about an unknown key
convert    a config of another trainer as one of ours: `mm-grpo convert`; files reads it
arguments  arguments of TRL's GRPOTrainer
"""
