"""Processors: a `Sample` in, a `Prompt` out, one vision-language family per file.

- `base.py`: the interface `Processor`, and `load_processor`, which loads the processor of a model.
- `model_folder.py`: checks of a model's folder before its weights: its config, without running the model's own code.
- `family.py`: how the models of a family are built (`Family`, `TiledFamily`); used by learner and embedded engine.
- `special_tokens.py`: token ids of a conversation, without special tokens that a row typed.
- `chat_template.py`: the arguments of a model's chat template.
- `tool_calls.py`: tool calls in a model's text, and tools and their answers in a template.
- `turn_ids.py`: ids of tools' answers and of gold answers, by the chat template.
- `hf_processor.py`: `HFProcessor`, the base of all families here, over the model's own transformers processor.
- `image_size.py`: the one resize of an image, to a size that its family's rule maps to itself.
- `video_input.py`: a video as transformers' processors and vLLM take it.
- `qwen_vl.py`: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, with experts too.
- `internvl.py`: InternVL3 and InternVL3.5 in transformers' form.
- `smolvlm.py`: SmolVLM, SmolVLM2 and Idefics3.
- `llava_onevision.py`: LLaVA-OneVision.
- `gemma3.py`: Gemma 3.

A new family is one file: a class with the members of `base.Processor`, and a `Family` as its `family`. It may lie
anywhere and be named in `model.processor`, as path/to/file.py:Class. Here it is decorated with
`@register("its_model_type")`, and its module stands in `base._FAMILIES`.
"""
