"""Processors: a `Sample` in, a `Prompt` out, one vision-language family per file.

- `base.py`: what a processor is (`Processor`), and how one is found for a model (`load_processor`).
- `model_folder.py`: what is read of a model before its weights: its config, without running code that it brings.
- `family.py`: how the models of a family are built (`Family`, `TiledFamily`), for learner and embedded engine.
- `special_tokens.py`: a conversation as ids, whose row cannot type the model's special tokens.
- `chat_template.py`: the arguments of a model's chat template.
- `tool_calls.py`: tool calls in what a model wrote, and how a template shows tools and their answers.
- `hf_processor.py`: `HFProcessor`, what the families here share, over the model's own transformers processor.
- `image_size.py`: the one resize of an image, to a size that its family's rule maps to itself.
- `qwen_vl.py`: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.
- `internvl.py`: InternVL3 and InternVL3.5 in transformers' form.
- `smolvlm.py`: SmolVLM, SmolVLM2 and Idefics3.
- `llava_onevision.py`: LLaVA-OneVision.
- `gemma3.py`: Gemma 3.

A new family is one file: a class that has what `base.Processor` lists, with a `Family` as its `family`. It may lie
anywhere and be named in `model.processor`, as path/to/file.py:Class. Here it is decorated with
`@register("its_model_type")`, and its module stands in `base._FAMILIES`.
"""
