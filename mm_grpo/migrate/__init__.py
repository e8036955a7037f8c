"""Names of TRL, ms-swift, verl and EasyR1, and ours for the same things.

keys       one table of foreign keys (our field, or a reason) and of foreign values; messages for unknown keys
convert    a config of another trainer as one of ours: `mm-grpo convert`; files reads it
arguments  arguments of TRL's GRPOTrainer
"""
