"""Linear attention over shared-prefix rows: a prompt is run once, and each completion goes on from its state.

A layer of gated delta rule (Yang et al. 2024, arXiv:2412.06464), as Qwen3.5 has it, hands two things from token to
token: the last inputs of a short causal convolution, and a matrix [keys, values] for each head. Here prompts run in
batches, and completions in others, which start from the end states of their prompts. So outputs and gradients equal
those of prompt + completion in one sequence. All else in the layer works on one token at a time.

The rule itself is transformers' torch code; on a GPU in bfloat16 an installed kernel of flash-linear-attention runs.
transformers_patches.py makes layers call this.

Rounding: if heads forget within a token or two (exp(A_log) of 5 and more, as published models have some), the
gradients of A_log, dt_bias and in_proj_a are small remainders of sums that cancel in the rule's fp32. They lie up to
8e-2 of their norm from the plain forward's, on either side of float64. They are 1e-4 of the whole gradient or less,
which equals the plain forward's to 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, softplus
from transformers.activations import ACT2FN

from mm_grpo.errors import ConfigError
from mm_grpo.learner.completion_batch import CompletionBatch, Sequences
from mm_grpo.learner.flex import warn_once
from mm_grpo.learner.prompt_states import Prefixes, PromptState
from mm_grpo.learner.transformers_patches import Rule, fla_rule, torch_rule, use_shared_state


@dataclass(frozen=True)
class SharedState:
    """Layout of a pack for a layer."""

    batch: CompletionBatch
    rule: Rule
    """Function that runs the gated delta rule."""
    keep_prompt: PromptState | None = None
    """Receives the states after a prompt that runs alone."""
    prefixes: Prefixes | None = None
    """States of the prompts that run apart."""


def shared_state_forward(layer: Any, hidden: Tensor, shared: SharedState) -> Tensor:
    """Run the layer over a pack's hidden states [B, N, D]; values at padding are arbitrary."""
    batch = shared.batch
    gate = layer.in_proj_z(hidden).reshape(-1, layer.head_v_dim)
    beta = layer.in_proj_b(hidden).sigmoid()
    decay = -layer.A_log.float().exp() * softplus(layer.in_proj_a(hidden).float() + layer.dt_bias)
    (mixed, completion_mixed), (beta, completion_beta), (decay, completion_decay) = (
        batch.split(x) for x in (layer.in_proj_qkv(hidden), beta, decay)
    )
    ran = [
        _run_prompts(layer, prompts, values, forgets, writes, shared.rule)
        for prompts, values, forgets, writes in zip(batch.prompts, mixed, decay, beta, strict=True)
    ]
    outs = [out for out, _, _ in ran]
    ends = [(state, tail) for _, state, tail in ran]
    if shared.keep_prompt is not None:
        shared.keep_prompt.keep(layer.layer_idx, lambda: ends[0])
    if shared.prefixes is not None:
        ends += shared.prefixes.pairs(layer.layer_idx)
    state, tail = (torch.cat([end[part] for end in ends]) for part in (0, 1))
    completion_outs = []
    for sequences, values, forgets, writes in zip(
        batch.completions, completion_mixed, completion_decay, completion_beta, strict=True
    ):
        values = torch.cat([batch.after_prompt(tail, sequences), values], 1)
        start = batch.after_prompt(state, sequences)
        completion_outs.append(_apply(layer, values, forgets, writes, start, shared.rule)[0])
    heads = batch.merge(outs, completion_outs, hidden.shape[:2]).reshape(-1, layer.head_v_dim)
    result: Tensor = layer.out_proj(layer.norm(heads, gate).reshape(*hidden.shape[:2], -1))
    return result


def _run_prompts(
    layer: Any, prompts: Sequences, mixed: Tensor, decay: Tensor, beta: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a batch of prompts; return values [r, P, H, dv], end states, and the convolution's last inputs [r, K - 1]."""
    context = layer.conv_kernel_size - 1
    mixed = pad(mixed, (0, 0, context, 0))
    if prompts.equal:
        tail = mixed[:, prompts.index.shape[1] :]
    else:
        # padding behind a shorter prompt must not change the state: it decays nothing and writes nothing
        behind = torch.arange(prompts.index.shape[1], device=mixed.device) >= prompts.lengths[:, None]
        beta, decay = (x.masked_fill(behind[:, :, None], 0.0) for x in (beta, decay))
        places = prompts.lengths[:, None] + torch.arange(context, device=mixed.device)
        tail = mixed.take_along_dim(places[:, :, None], 1)
    out, state = _apply(layer, mixed, decay, beta, None, rule)
    return out, state, tail


def _apply(
    layer: Any, mixed: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Run convolution and rule over sequences of S tokens; return values [b, S, H, dv] and end states [b, H, dk, dv].

    `mixed` [b, K - 1 + S, channels] begins with the inputs that the convolution, of K taps, looks back to.
    """
    weight = layer.conv1d.weight
    convolved = conv1d(mixed.transpose(1, 2), weight, layer.conv1d.bias, groups=len(weight))
    convolved = ACT2FN[layer.activation](convolved).transpose(1, 2)
    query, key, value = convolved.split((layer.key_dim, layer.key_dim, layer.value_dim), -1)
    query, key = (x.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)) for x in (query, key))
    shared_by = layer.num_v_heads // layer.num_k_heads
    if shared_by > 1:
        query, key = (x.repeat_interleave(shared_by, 2) for x in (query, key))
    return rule(
        query,
        key,
        value.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
        g=decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


# which function runs the rule ----------------------------------------------------------------


def prepare_linear_layers(model: Any) -> Rule | None:
    """Patch the model's linear layers to take a `shared_state`; return the rule that they run, None without any.

    Raises ConfigError if a layer of the model has a state of another kind.
    """
    text = model.config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ())
    layers = use_shared_state(model, shared_state_forward)
    if len(layers) != kinds.count("linear_attention"):
        raise ConfigError(
            f"model.path: a {text.model_type} cannot be trained exactly: of its {kinds.count('linear_attention')} "
            f"layers of linear attention {len(layers)} are gated delta nets as transformers' Qwen3.5 has them, and "
            "only these can start a completion from the state after its prompt"
        )
    if not layers:
        return None
    plain, kernel = torch_rule(layers[0]), fla_rule()
    if torch.device(model.device).type != "cuda" or model.dtype == torch.float32:
        return plain
    if kernel is None:
        warn_once(
            "flash-linear-attention cannot be imported: layers of linear attention run in torch, chunk after chunk "
            "of tokens; its kernel is what pip install 'mm_grpo[flash-linear-attention]' brings"
        )
        return plain
    return kernel
