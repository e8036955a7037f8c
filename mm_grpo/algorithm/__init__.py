"""Algorithm: pure functions of rewards and tensors, no trainer in sight.

- `advantages/`: rewards to advantages, one file per estimator.
- `surrogate.py`: the clipped policy-gradient term of a token.
- `importance.py`: probability ratios of tokens and of completions.
- `kl.py`: the penalty against a reference policy, in the loss or in the reward.
- `correction.py`: weights and masks for a policy that is not the one that sampled.
- `masks.py`: which tokens enter the loss.
- `losses/`: how tokens are weighed into one number, one file per loss type.
"""
