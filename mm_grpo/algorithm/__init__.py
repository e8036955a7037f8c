"""The mathematics of GRPO: pure functions of rewards and tensors.

- `advantages.py`: rewards to advantages, one function per estimator.
- `turn_advantages.py`: rewards of turns to advantages of turns.
- `losses.py`: the loss and the weight of each token, one function per loss type.
- `kl.py`: the penalty against a reference policy, in the loss or in the reward.
- `perception.py`: PAPO's term, and its masked images.
- `credit.py`: weights of tokens' advantages, by how much a token depends on its image.
- `correction.py`: weights and masks for a policy that is not the one that sampled.
- `masks.py`: tokens that enter the loss.

None of it needs a trainer or a config object. `learner/loss.py` puts the loss of a pack together from these.
"""
