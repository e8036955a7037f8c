"""The rewards that ship with mm_grpo, one file each; `answers.py` is the text handling that they share.

| name          | columns  | score                                                             |
|---------------|----------|-------------------------------------------------------------------|
| `exact_match` | `answer` | 1 when the final answer is the gold text                          |
| `choice`      | `answer` | 1 when the option letter that the completion settles on is gold's |
| `format`      | none     | 1 when the whole completion has the asked form                    |
| `length`      | none     | 1 within a range of lengths, falling linearly to 0 outside it     |

To add one: a file here with a docstring that gives units, range, edge cases and a doctest, its name
in `registry.BUILTINS`, and a test of its boundaries. Every one is linear in the length of the text.
"""
