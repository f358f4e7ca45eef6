"""The numeric state that every evaluation starts from and must leave behind.

One prescribed configuration, set before and checked after each call into a candidate: a kernel measured under somebody's
leftover TF32 switch, or one that leaves such a switch behind, would make every later figure a lie.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def reset(threads: int | None = None) -> None:
    """Sets the prescribed state: strict float32 products, no autotuned cuDNN, no autograd, no default device."""
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)  # naming a device here would put a Python mode around every call
    for switch in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, switch)(True)
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)


def state() -> dict[str, Any]:
    """What a candidate must leave as it found it."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "matmul TF32": torch.backends.cuda.matmul.allow_tf32,
        "cuDNN TF32": torch.backends.cudnn.allow_tf32,
        "fp16 reductions": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bf16 reductions": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cuDNN benchmark": torch.backends.cudnn.benchmark,
        "cuDNN deterministic": torch.backends.cudnn.deterministic,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),
        "threads": torch.get_num_threads(),
        "environment": {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"},
    }


def changed(before: dict[str, Any]) -> list[str]:
    """Names of what differs now."""
    now = state()
    return [name for name, value in before.items() if now[name] != value]
