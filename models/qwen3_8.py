"""Qwen3.8-27B: a hybrid of gated delta nets and attention, three to one (HF model type qwen3_5).

The card holds configurations and expectations, never weights. `build` makes the stock transformers model with random values in
the ranges of trained ones, so that no norm is the identity and no gate is stuck.
"""

from __future__ import annotations

from typing import Any

import torch

from jasperk_inductor.errors import JasperkError, UnknownName, nearest

NAME = "qwen3_8"
TITLE = "Qwen3.8-27B"

# Letters of the published families, in ledger order.
LETTERS = {
    "ffn_down": "A",
    "ffn_gate_up": "B",
    "gdn_input": "C",
    "attn_output": "D",
    "attn_qkv": "E",
    "residual_rmsnorm": "F",
    "silu_mul": "G",
    "gated_rmsnorm": "H",
    "qk_norm_rope": "I",
}

# Families beyond the published nine: part of the default policy, without a row of their own.
BEYOND = {"attn_decode": "K"}

SIZES: dict[str, dict[str, Any]] = {
    "full": dict(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
        vocab_size=248320,
    ),
    "tiny": dict(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
        vocab_size=512,
    ),
}  # fmt: skip


def config(size: str = "full", layers: int | None = None, **changes: Any) -> Any:
    """The HF configuration of a size, with fewer layers or other changes if asked for."""
    from transformers import Qwen3_5TextConfig

    if size not in SIZES:
        raise UnknownName(f"{TITLE} has no size {size!r}.{nearest(size, SIZES)}")
    values = dict(SIZES[size]) | changes
    if layers is not None:
        if layers % 4 or not 0 < layers <= SIZES[size]["num_hidden_layers"]:
            most = SIZES[size]["num_hidden_layers"]
            raise JasperkError(
                f"{TITLE} ({size}) has {most} layers in groups of four, three gated delta nets and one attention; not {layers}."
            )
        values["num_hidden_layers"] = layers
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return Qwen3_5TextConfig(rope_parameters=rope, tie_word_embeddings=False, **values)


def expected_sites(size: str = "full", layers: int | None = None) -> dict[str, int]:
    """Sites per family in one graph, prefill or decode."""
    count = layers or SIZES[size]["num_hidden_layers"]
    attention = count // 4
    return {
        "ffn_down": count,
        "ffn_gate_up": count,
        "gdn_input": count - attention,
        "attn_output": count,
        "attn_qkv": attention,
        "residual_rmsnorm": 2 * count,
        "silu_mul": count,
        "gated_rmsnorm": count - attention,
        "qk_norm_rope": attention,
    }


def build(config: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """The stock model with random weights, in eval mode.

    Args:
        device: "meta" gives a model without memory, for tracing at full size anywhere.
    """
    from transformers import Qwen3_5ForCausalLM

    with torch.device("meta"):
        model: Any = Qwen3_5ForCausalLM(config)
    model = model.to(dtype)
    if device != "meta":
        model = model.to_empty(device=device)
        generator = torch.Generator(device=device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter, generator)
    _restore_buffers(model, config, device)
    return model.eval()


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith("A_log"):
        parameter.uniform_(0.0, 2.5, generator=generator)
    elif name.endswith("linear_attn.norm.weight"):
        parameter.normal_(1.0, 0.2, generator=generator)
    elif parameter.dim() == 1:  # zero-centred norms and biases
        parameter.normal_(0.0, 0.2, generator=generator)
    elif "conv1d" in name:
        parameter.normal_(0.0, 0.4, generator=generator)
    else:
        parameter.normal_(0.0, 0.02, generator=generator)  # transformers' own initializer_range


def _restore_buffers(model: torch.nn.Module, config: Any, device: str) -> None:
    """Rotary frequencies are computed at construction, which on the meta device gave nothing."""
    for module in model.modules():
        if type(module).__name__.endswith("TextRotaryEmbedding"):
            fresh = type(module)(config)
            for name, buffer in fresh.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
