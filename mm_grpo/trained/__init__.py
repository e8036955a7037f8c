"""Models that runs have trained, found and loaded for `mm-grpo eval`, `export` and `ask` alike.

source  which model is meant by a run's folder, a checkpoint's, a model folder or a name on the Hub
model   a checkpoint's weights put into the model that they belong to
"""
