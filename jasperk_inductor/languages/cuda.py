"""CUDA C++ for NVIDIA GPUs: the same C function as on a CPU, with a stream. Built by nvcc for the device's own architecture."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from ..contract import Candidate, Spec, Status
from . import abi, cpp
from .base import Kernel, Language
from .compile import LIBRARY, compile_library, find_tool

HOPPER = "-gencode=arch=compute_90a,code=sm_90a"
TOOL = "nvcc is needed for CUDA C++ kernels: install the CUDA toolkit or set JASPERK_NVCC"


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return find_tool("JASPERK_NVCC", *([f"{home}/bin/nvcc"] if home else []), "nvcc", "/usr/local/cuda/bin/nvcc")


@functools.cache
def architecture() -> str:
    """The target: the present GPU's, with Hopper's own instructions (sm_90a) where it has them; sm_90a without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability()
    name = f"{major}{minor}" + ("a" if major >= 9 else "")
    return f"-gencode=arch=compute_{name},code=sm_{name}"


def flags(target: str) -> list[str]:
    return ["-std=c++17", "-O3", target, "-Xcompiler", "-fPIC", "--expt-relaxed-constexpr", "-lineinfo"]


def screen(source: str) -> tuple[Status, str] | None:
    if (refused := cpp.screen(source)) is not None:
        return refused
    if not re.search(r"__global__\s", source):
        return Status.NO_CUSTOM_KERNEL, "it defines no __global__ kernel"
    return None


def missing(device: str) -> str | None:
    return None if nvcc() else TOOL


def build(candidate: Candidate, spec: Spec, folder: Path, timeout: float) -> None:
    text = abi.source(candidate, spec, cuda=True)
    compile_library(nvcc(), flags(architecture()), text, ".cu", folder, timeout, TOOL)


def load(folder: Path, candidate: Candidate, spec: Spec) -> Kernel:
    import torch

    return abi.bind(folder / LIBRARY, spec, lambda tensor: torch.cuda.current_stream(tensor.device).cuda_stream)


LANGUAGE = Language("cuda", "kernel.cu", ("cuda",), missing, screen, build, load)
