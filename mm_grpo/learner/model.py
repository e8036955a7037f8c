"""The model that is trained: loaded from a folder, or passed in, and then treated alike.

The policy is a plain transformers model. Its dtype and device are settled here once: bfloat16 on a GPU and float32 on
a CPU unless the config says otherwise; a model that is passed in keeps its own. Whatever the config asks for is
applied or refused. Weights that are missing, of another shape or not finite are refused, because transformers would
draw missing ones at random. A model with configs that cannot be written is refused before training, not after.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from mm_grpo.config import ModelConfig
from mm_grpo.errors import ConfigError
from mm_grpo.files import temporary_folder
from mm_grpo.learner.lora import add_adapters
from mm_grpo.learner.quantization import dense, nf4_options, run_exactly
from mm_grpo.learner.transformers_patches import save_pretrained
from mm_grpo.processors.family import Family
from mm_grpo.processors.model_folder import quantization_of, quoted, read_config, refuse_own_code
from mm_grpo.terminal import quiet_libraries

logger = logging.getLogger("mm_grpo")
TRAINABLE_DTYPES = (torch.float32, torch.bfloat16)


def load_model(config: ModelConfig, family: Family) -> Any:
    """Return the model at `config.path`, built for `family`, ready to train. ConfigError if it cannot be read whole."""
    where = f"model.path = '{config.path}'"
    device = resolve_device(config.device)
    model_config = read_config(config.path, trust_remote_code=config.trust_remote_code)
    dtype = resolve_dtype(config.dtype, device)
    # straight to a GPU: processes that each build the model on the host first may not fit there together
    options: dict[str, Any] = {"device_map": None if device.type == "cpu" else device}
    try:
        with quiet_libraries():
            options |= nf4_options(config, model_config, family, dtype)
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                config.path,
                dtype=dtype,
                attn_implementation="sdpa",  # the learner puts its own in its place
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,  # a pickle runs code when it is read
                ignore_mismatched_sizes=True,  # they are named below
                output_loading_info=True,
                **options,
            )
    except torch.OutOfMemoryError:  # the folder is not at fault
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        refuse_own_code(config.path, error, config.trust_remote_code)
        raise ConfigError(
            f"{where}: the weights cannot be loaded ({quoted(error)}); give a folder that save_pretrained wrote for a "
            "vision-language model, or a hub name that this machine can reach"
        ) from None
    model, info = loaded
    _refuse_adapters(where, model)  # transformers loads those of an adapter_config.json in the folder
    _refuse_incomplete(where, info)
    if config.quantization is not None:  # from here on it is saved as any other
        model.hf_quantizer.remove_quantization_config(model)
        run_exactly(model)
    model.to(device)
    return _prepare(where, model, config, family)


def adopt_model(
    model: Any, config: ModelConfig, family: Family, *, from_path: str | None = None, several: bool = False
) -> Any:
    """Prepare the passed-in `model` in place as a loaded one: adapters, frozen tower, attention, training mode.

    It keeps its dtype and device; ConfigError if the config asks for others by name. `from_path` names what else is
    made from `model.path` (`processor` or `engine`): the model there has to be of the same type. With `several`
    processes the model has to be on this process's device. Parameters that the caller froze stay frozen.
    """
    where = "the model that was passed in"
    if config.quantization is not None:
        raise ConfigError(
            f"model.quantization = '{config.quantization}': {where} is trained as it is; leave one of the two out"
        )
    _refuse_adapters(where, model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{where} is a {type(model).__name__}: must be a model of transformers, not wrapped or compiled"
        )
    if quantization_of(model.config) is not None:
        raise ConfigError(f"{where} is quantised ({quantization_of(model.config)}), and cannot be trained")
    _refuse_other_place(where, model, config, several)
    if from_path is not None:
        type_at_path = read_config(config.path, trust_remote_code=config.trust_remote_code).model_type
        if type_at_path != model.config.model_type:
            raise ConfigError(
                f"model.path = '{config.path}' is a {type_at_path}, and the model that was passed in a "
                f"{model.config.model_type}; the {from_path} is made from model.path: save the model, and name its "
                "folder there"
            )
    # an earlier trainer may have left its own attention in the text layers and the tower
    model.set_attn_implementation("sdpa")
    return _prepare(where, model, config, family)


def check_saveable(model: Any, processor: Any) -> None:
    """Save everything but the weights to a folder that is removed. ConfigError if something cannot be saved.

    transformers loads sampling flags without `do_sample` in a generation config and refuses to save them: then
    `do_sample` is set, with a warning.
    """
    _repair_generation_config(model)
    with temporary_folder("save") as folder:
        try:
            save_pretrained(model, folder, state_dict={})
            processor.save(folder)
        except Exception as error:  # any error would come again after the last step and cost the run
            raise ConfigError(
                f"the model could not be saved after training: its config or its processor cannot be written "
                f"({type(error).__name__}: {quoted(error)})"
            ) from error


def use_checkpointing(model: Any, enable: bool | None) -> bool:
    """Turn gradient checkpointing on or off and return the choice; None is on for a model on a GPU that has it.

    ConfigError if it is asked for and the model has none.
    """
    if enable is None:
        enable = model.device.type == "cuda" and getattr(model, "supports_gradient_checkpointing", False)
    # transformers 5.24 warns of the old names, and 6 has them no more
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if not enable:
        if getattr(model, f"is_{name}_checkpointing", False):
            getattr(model, f"{name}_checkpointing_disable")()
        return False
    try:
        getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"optim.gradient_checkpointing = true: {quoted(error)}; set it to false") from None
    return True


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is the current GPU, else the CPU. ConfigError if it is absent or not ours."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model.device = '{name}' cannot be used here ({str(error).splitlines()[0]}); legal are auto, cpu, cuda"
        ) from None
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ConfigError(
            f"model.device = '{name}': vLLM and NCCL take this process's first GPU; write cuda, and choose a GPU with "
            f"CUDA_VISIBLE_DEVICES={device.index}"
        )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; `auto` is bfloat16 on a GPU that computes in it, else float32."""
    if name == "auto":
        # a GPU older than Ampere emulates bfloat16, and has no kernel for attention in it
        emulated = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if device.type == "cuda" and not emulated else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


# both ----------------------------------------------------------------------------------------


def _prepare(where: str, model: Any, config: ModelConfig, family: Family) -> Any:
    family.check(model)
    _refuse_not_finite(where, model)
    if config.freeze_vision:
        family.tower(model).requires_grad_(False)
    if config.freeze_router:
        if not (routers := family.routers(model)):
            raise ConfigError(f"model.freeze_router = true: {where} has no router; leave it out")
        nn.ModuleList(routers).requires_grad_(False)
    if config.lora is not None:
        add_adapters(model, config.lora, family)
    return model.train()


def _refuse_adapters(where: str, model: Any) -> None:
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"{where} has adapters of peft: give the base model, and set model.lora to train adapters (what its own "
            "have learned is kept by merge_and_unload, and dropped by unload)"
        )


def _refuse_not_finite(where: str, model: Any) -> None:
    """Refuse NaN and infinite weights: one pass on their device, and one number back."""
    with torch.no_grad():
        parameters = [(name, p) for name, p in model.named_parameters() if p.numel()]
        flags = [torch.stack(dense(p).aminmax()).isfinite().all() for _, p in parameters]
        if bool(torch.stack(flags).all()):
            return
        wrong = [name for (name, _), finite in zip(parameters, flags, strict=True) if not finite]
    raise ConfigError(
        f"{where}: {wrong[0]} holds NaN or infinite numbers{_others(wrong, 'tensor')}; such a model answers nothing, "
        "and no update can repair it"
    )


# loaded --------------------------------------------------------------------------------------


def _refuse_incomplete(where: str, info: Mapping[str, Any]) -> None:
    for fault, keys in (
        ("is missing, and would be drawn at random", info["missing_keys"]),
        ("has another shape there", [name for name, *_ in info["mismatched_keys"]]),
        ("is none of the model's", info["unexpected_keys"]),
    ):
        if names := sorted(keys):
            raise ConfigError(
                f"{where}: the weights are not those of its config.json: {names[0]} {fault}{_others(names, 'tensor')}; "
                "give the whole model"
            )


# passed in -----------------------------------------------------------------------------------


def _refuse_other_place(where: str, model: Any, config: ModelConfig, several: bool) -> None:
    devices = {p.device for p in model.parameters()}
    dtypes = {p.dtype for p in model.parameters()}
    several_kinds = len(devices) > 1 or len(dtypes) > 1
    if several_kinds or "meta" in {d.type for d in devices} or not dtypes <= set(TRAINABLE_DTYPES):
        dtype_names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise ConfigError(
            f"{where} has weights in {dtype_names} on {', '.join(sorted(map(str, devices)))}: must be in float32, or "
            "all in bfloat16, on one device; load it without device_map, with such a dtype"
        )
    (device,), (dtype,) = devices, dtypes
    device_of_config = resolve_device(config.device)
    if config.dtype != "auto" and dtype != getattr(torch, config.dtype):
        raise ConfigError(
            f"model.dtype = '{config.dtype}': {where} is in {str(dtype).removeprefix('torch.')}"
        )
    bound = config.device != "auto" or several or device.type == "cuda"
    if bound and device != torch.empty(0, device=device_of_config).device:  # with the number of a GPU
        raise ConfigError(
            f"model.device = '{config.device}': {where} is on {device}, and not on {device_of_config}"
        )


def _repair_generation_config(model: Any) -> None:
    generation_config = getattr(model, "generation_config", None)
    if generation_config is None:
        return
    try:
        generation_config.validate(strict=True)
    except ValueError:
        model.generation_config = copy.deepcopy(generation_config)
        model.generation_config.do_sample = True
        logger.warning(
            "the model's generation config sets sampling flags and not do_sample, with which it cannot be saved; "
            "do_sample=True is written into the saved one"
        )


def _others(names: Iterable[Any], noun: str) -> str:
    more = len(list(names)) - 1
    return f" ({more} more {noun}{'s' * (more > 1)})" if more else ""
