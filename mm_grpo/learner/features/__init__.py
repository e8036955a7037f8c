"""Loss features: what may be added to the updates of a run. The learner calls their hooks and knows none by name.

- `base.py`: `LossFeature`, whose hooks stand in the order of a step.
- `table.py`: the features in the order in which they act, each with the field that turns it on.
- `top_entropy.py`: only the tokens of the highest entropy enter the loss (`algorithm.top_entropy_quantile`).
- `credit.py`: advantages of tokens weighed by how much a token depends on its image (`algorithm.credit`).
- `perception.py`: PAPO's term, with masked images (`algorithm.perception_coef`).
- `twin_view.py`: the same weights with a better view of the image as a teacher (`algorithm.twin_view`).

To add one, write a file with a subclass and a line in `table.py`. A user's own needs no change here: it is named in
`algorithm.features`.
"""
