"""The rewards that ship with mm_grpo, one file each. docs/rewards.md lists them with their options.

    text        exact_match, choice, format, contains, json_schema
    numbers     math (maths.py), numeric, count
    vision      iou, giou, box_match, point_in_box, mask_iou
    documents   anls, edit_similarity, chart_relaxed, table_f1
    shaping     length, soft_overlong, cosine_length, repetition_penalty, language
    models      judge, reward_model

What several share: `answers.py` (where the final answer stands), `numerals.py` (numbers in text), `boxes.py`
(boxes, points, coordinate systems), `masks.py`, `tables.py`, `assignment.py` (one-to-one matching),
`chat.py` (asking a server) and `libraries.py` (packages that only some need).

To add one: a file here whose docstring gives units, range, edge cases, the data it serves and a
doctest; its name in `registry.BUILTINS`; a test of its boundaries; then `python docs/make_rewards.py`.
Every one takes time linear in the length of the completion, but for edit distances, which have short
golds or fast code.
"""
