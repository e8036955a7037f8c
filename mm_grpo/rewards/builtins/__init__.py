"""The rewards that ship with mm_grpo, one subject a file. docs/rewards.md lists them with their options.

- `text.py`          exact_match, contains, choice, anls, edit_similarity
- `numeric.py`       numeric, count, chart_relaxed; numbers in digits and words
- `maths.py`         math
- `grounding.py`     iou, giou, box_match, point_in_box
- `boxes.py`         boxes and points in a text, coordinate spaces
- `masks.py`         mask_iou
- `documents.py`     json_schema, table_f1
- `shaping.py`       format, length, soft_overlong, cosine_length, repetition_penalty, language
- `judge.py`         judge, with `chat.py`, the client of its server
- `reward_model.py`  reward_model
- `answers.py`       where the final answer stands, gold answers, normal forms of texts
- `libraries.py`     packages that only some rewards need

To add one: a function whose docstring gives units, range, edge cases, the data it serves and a doctest; its name in
`registry.BUILTINS`; a test of its boundaries; then `python docs/make_rewards.py`. Every one takes time linear in
the length of the completion, but for edit distances, which have short golds or fast code.
"""
