"""Processors: a `Sample` in, a `Prompt` out, one vision-language family per file.

- `base.py`: the protocol and the registry (`load_processor`).
- `resize.py`: the one resize of an image, to a fixed point of the family's rule.
- `qwen_vl.py`: Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

A new family is one file with a class that keeps `base.Processor`, decorated with
`@register("its_model_type")`, and its module's name in `base._FAMILIES`.
"""
