"""Names of TRL, ms-swift, verl and EasyR1, and ours for the same things.

keys       one table of foreign keys (our field, or a reason) and of foreign values; messages for unknown keys
convert    a config of another trainer as one of ours: `mm-grpo convert`
rules      its rules for keys that need more than a name, and the defaults of other trainers
files      the file that it reads; shell has the words of shell scripts
arguments  arguments of TRL's GRPOTrainer
"""
