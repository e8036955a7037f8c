"""Engine against learner: do both see the same tokens, images and weights?

gaps               pure comparisons of log-probs, and the check at the start of a run
sync               sends the learner's weights to the engine, and verifies that it uses them
fixed_completions  completions that both sides score after every update, and judgements on the scores
images             measurements of images: that they are read, and how much completions depend on them
"""
