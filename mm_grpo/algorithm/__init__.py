"""Algorithm: pure functions of tensors, no trainer in sight.

- `advantages.py`: rewards to advantages, group by group.
- `surrogate.py`: the clipped policy-gradient term of a token.
- `kl.py`: the penalty against a reference policy.
- `losses/`: how tokens are weighed into one number, one file per loss type.
"""
