"""Engine against learner: do both see the same tokens, images and weights?

gaps    pure comparisons of log-probs, and the check at the start of a run
sync    the learner's weights sent to the engine, and what it makes of them verified
canary  fixed completions that both sides score after every update, and what the scores say
images  what a step measures of images: that they are read, and how much completions depend on them
"""
