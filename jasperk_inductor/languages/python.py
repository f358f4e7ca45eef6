"""Candidates that are Python modules: loading them, and the static rules that hold for all of them.

Such a module defines `run(<inputs in order>, *, <params>)`, which returns the outputs. The rules are checked on the syntax tree,
never by running anything: no way out of the module (files, processes, frames, the garbage collector, dynamic code), and no
`try`, because a kernel that falls back to torch when it fails has not been tested.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..contract import Candidate, Spec, Status
from .base import BuildFailed, Kernel

MODULE = "kernel.py"

_IMPORTS = {"torch", "triton", "math", "functools", "itertools", "typing", "dataclasses", "operator", "__future__", "collections"}
_NAMES = {
    "eval", "exec", "compile", "open", "__import__", "globals", "locals", "vars", "getattr", "setattr", "delattr", "input",
    "breakpoint", "memoryview", "exit", "quit",
}  # fmt: skip
_ATTRIBUTES = {
    "__globals__", "__builtins__", "__subclasses__", "__bases__", "__mro__", "__code__", "__closure__", "__dict__", "f_back",
    "f_locals", "f_globals", "gi_frame", "tb_frame", "_C", "modules", "load_inline", "cpp_extension", "multiprocessing",
    "set_rng_state", "manual_seed", "set_num_threads", "set_default_dtype", "set_default_device", "set_float32_matmul_precision",
    "allow_tf32", "fp32_precision", "use_deterministic_algorithms", "untyped_storage", "data_ptr", "from_blob", "hub", "save",
}  # fmt: skip


def parse(source: str) -> ast.Module | tuple[Status, str]:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return Status.BUILD_FAILED, f"it is no Python: {error}"


def screen_tree(tree: ast.Module) -> tuple[Status, str] | None:
    """The rules that every Python candidate must obey."""
    if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
        return Status.NO_CUSTOM_KERNEL, "the module must define run(...)"
    for node in ast.walk(tree):
        at = f" (line {getattr(node, 'lineno', '?')})"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or "."]
            for name in names:
                if name.split(".")[0] not in _IMPORTS:
                    return Status.FORBIDDEN, f"it may not import {name}{at}"
        elif isinstance(node, ast.Try | ast.TryStar):
            return Status.FORBIDDEN, f"it may not use try: a fallback would hide a kernel that fails{at}"
        elif isinstance(node, ast.Name) and node.id in _NAMES:
            return Status.FORBIDDEN, f"it may not use {node.id}{at}"
        elif isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
            return Status.FORBIDDEN, f"it may not use .{node.attr}{at}"
        elif isinstance(node, ast.Global | ast.Nonlocal):
            return Status.FORBIDDEN, f"it may not keep state between calls ({type(node).__name__.lower()}){at}"
    return None


def build(candidate: Candidate, spec: Spec, folder: Path, timeout: float) -> None:
    """Python needs no build: the module's text is the artifact."""
    if isinstance(tree := parse(candidate.source), tuple):
        raise BuildFailed(tree[1])
    (folder / MODULE).write_text(candidate.source)


def load_run(folder: Path, scope: dict[str, Any]) -> Callable[..., Any]:
    """Executes folder/kernel.py and returns its `run`. Its text stays findable, which Triton's JIT needs."""
    path = folder / MODULE
    text = path.read_text()
    filename = str(path)
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), scope)
    return scope["run"]


def as_kernel(run: Callable[..., Any], candidate: Candidate, spec: Spec) -> Kernel:
    """`run` with the constants of the Problem and the launch parameters filled in; a sole output becomes a tuple."""
    constants = dict(spec.params) | dict(candidate.params)

    def kernel(*inputs: Any) -> tuple[Any, ...]:
        result = run(*inputs, **constants)
        return result if isinstance(result, tuple) else (result,)

    return kernel
