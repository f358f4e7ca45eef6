"""Triton for NVIDIA GPUs. A module with `@triton.jit` kernels and a `run` that launches them.

Triton compiles at the first call, into a cache folder. Here that folder lies inside the artifact, so a built kernel moves as a
whole: on a matching device and Triton the first call finds its binary and compiles nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..contract import Candidate, Spec, Status
from . import python
from .base import Kernel, Language

_lock = threading.Lock()


def interpreted() -> bool:
    """Whether Triton runs its interpreter (TRITON_INTERPRET=1), which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def missing(device: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is needed: `pip install triton` (it comes with torch's CUDA builds)"
    if device == "cpu" and not interpreted():
        return "Triton kernels run on a CPU only in its interpreter (TRITON_INTERPRET=1)"
    return None


def screen(source: str) -> tuple[Status, str] | None:
    if isinstance(tree := python.parse(source), tuple):
        return tree
    if (refused := python.screen_tree(tree)) is not None:
        return refused
    kernels = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and any(_is_jit(d) for d in n.decorator_list)}
    if not kernels:
        return Status.NO_CUSTOM_KERNEL, "it defines no @triton.jit kernel"
    launched = {
        n.func.value.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript) and isinstance(n.func.value, ast.Name)
    }
    if not kernels & launched:
        return Status.NO_CUSTOM_KERNEL, f"it never launches its kernel ({', '.join(sorted(kernels))})"
    return None


def _is_jit(decorator: ast.expr) -> bool:
    decorator = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (isinstance(decorator, ast.Attribute) and decorator.attr == "jit") or (isinstance(decorator, ast.Name) and decorator.id == "jit")


@contextmanager
def cache_folder(folder: Path) -> Iterator[None]:
    """Points Triton's cache at a folder, for this process, until the end of the block."""
    with _lock:
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
        try:
            yield
        finally:
            if before is None:
                os.environ.pop("TRITON_CACHE_DIR", None)
            else:
                os.environ["TRITON_CACHE_DIR"] = before


def load(folder: Path, candidate: Candidate, spec: Spec) -> Kernel:
    run = python.load_run(folder, {"__name__": "jasperk_candidate"})
    return python.as_kernel(run, candidate, spec)


LANGUAGE = Language("triton", "triton.py", ("cuda", "cpu"), missing, screen, python.build, load, warm=True)
