"""Plain torch, as a kernel language: for controls and for measuring what a library call does. The static screen rejects it as
a candidate, since it contributes no kernel of its own."""

from __future__ import annotations

from pathlib import Path

from ..contract import Candidate, Spec, Status
from . import python
from .base import Kernel, Language


def screen(source: str) -> tuple[Status, str] | None:
    if isinstance(tree := python.parse(source), tuple):
        return tree
    return python.screen_tree(tree) or (Status.NO_CUSTOM_KERNEL, "it only calls torch; a candidate must bring a kernel of its own")


def load(folder: Path, candidate: Candidate, spec: Spec) -> Kernel:
    return python.as_kernel(python.load_run(folder, {"__name__": "jasperk_candidate"}), candidate, spec)


LANGUAGE = Language("torch", "torch.py", ("cpu", "cuda"), lambda device: None, screen, python.build, load)
