"""A subgraph as source text, and source text as a function.

The reference of a Problem is the user's own subgraph, written out as a few lines of Python with canonical names: no two sites
that compute the same differ in a letter, and the text can be hashed, read, cached and run in another process. `exact` runs the
same text with every floating type widened to float64.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.overrides import TorchFunctionMode

from .errors import BadProblem

_HEADER = "import operator\n\nimport torch\nimport torch.nn.functional as F\n\n\n"


class NotWritable(Exception):
    """A node cannot be written as source: an operator or argument that has no public name."""


@functools.cache
def _public_names() -> dict[Any, str]:
    """Function -> public name. Later entries win, so that the most usual spelling is the canonical one."""
    names: dict[Any, str] = {}
    for prefix, module in (("torch.special", torch.special), ("torch", torch), ("F", F), ("operator", operator)):
        for name in sorted(dir(module)):
            function = getattr(module, name)
            if callable(function) and not name.startswith("_") and not inspect.isclass(function):
                try:
                    names[function] = f"{prefix}.{name}"
                except TypeError:  # not hashable
                    continue
    names[operator.add], names[operator.mul], names[operator.getitem] = "operator.add", "operator.mul", "operator.getitem"
    return names


def _literal(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        if value not in names:
            raise NotWritable(f"it depends on {value.name}, which is no input of it")
        return names[value]
    if value is None or value is Ellipsis or isinstance(value, bool | int | str):
        return "..." if value is Ellipsis else repr(value)
    if isinstance(value, float):
        return repr(value) if value == value and abs(value) != float("inf") else f"float({str(value)!r})"
    if isinstance(value, torch.dtype | torch.memory_format):
        return repr(value)
    if isinstance(value, slice):
        return f"slice({', '.join(_literal(v, names) for v in (value.start, value.stop, value.step))})"
    if isinstance(value, list | tuple):
        inner = ", ".join(_literal(v, names) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    raise NotWritable(f"it holds a value of type {type(value).__name__}")


def write(nodes: Iterable[fx.Node], inputs: Mapping[str, fx.Node], outputs: Iterable[fx.Node], constants: Mapping[fx.Node, float]) -> str:
    """The source of `reference(<roles>)` that computes `outputs`, as a tuple, from `inputs`.

    Raises:
        NotWritable: a node or argument has no public name; the message completes "the site is kept: …".
    """
    names: dict[fx.Node, str] = {node: role for role, node in inputs.items()}
    names |= {node: repr(float(value)) for node, value in constants.items()}
    lines: list[str] = []
    for node in nodes:
        if node in names:
            continue
        arguments = [_literal(a, names) for a in node.args] + [f"{k}={_literal(v, names)}" for k, v in node.kwargs.items()]
        if node.op == "call_method":
            call = f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
        elif node.op == "call_function" and node.target in _public_names():
            call = f"{_public_names()[node.target]}({', '.join(arguments)})"
        else:
            raise NotWritable(f"the operator {node.target} has no public name")
        names[node] = f"v{len(lines)}"
        lines.append(f"    {names[node]} = {call}\n")
    results = ", ".join(names[o] for o in outputs)
    return f"{_HEADER}def reference({', '.join(inputs)}):\n{''.join(lines)}    return ({results},)\n"


@functools.lru_cache(maxsize=512)
def load(source: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function `reference` of a Problem's source text.

    Raises:
        BadProblem: the text does not run or defines no such function.
    """
    scope: dict[str, Any] = {"__builtins__": builtins, "__name__": "jasperk_reference"}
    try:
        exec(compile(source, "<jasperk reference>", "exec"), scope)  # our own text, or a benchmark task the user named
        function = scope["reference"]
    except Exception as error:
        raise BadProblem(f"the reference does not load ({type(error).__name__}: {error}); it must define reference(...)") from error
    return function


_WIDTH = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double}


class widened(TorchFunctionMode):
    """While active, everything floating is computed in `to` at least: narrower tensors are widened as they enter an operation,
    and casts to narrower types become casts to `to`. So a model runs in float64 as it is, without a second copy of its weights.

    What is written in place keeps its own type.
    """

    def __init__(self, to: torch.dtype) -> None:
        super().__init__()
        self.to = to

    def _narrow(self, dtype: Any) -> bool:
        return isinstance(dtype, torch.dtype) and _WIDTH.get(dtype, 9) < _WIDTH[self.to]

    def _widen(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and self._narrow(value.dtype):
            return value.to(self.to)
        if self._narrow(value):
            return self.to
        if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
            return type(value)(self._widen(v) for v in value)
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: self._widen(v) for k, v in (kwargs or {}).items()}
        name = getattr(func, "__name__", "")
        if func in _CASTS:
            return args[0].to(self.to)
        if name == "__get__" or name in ("dtype", "device", "shape", "size", "dim", "stride"):
            return func(*args, **kwargs)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            target = args[0].dtype
            rest = tuple(a.to(target) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args[1:])
            return func(args[0], *rest, **kwargs)
        return func(*(self._widen(a) for a in args), **kwargs)


def exact(source: str, inputs: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The reference in float64: floating inputs widened, and every cast inside as well."""
    with torch.no_grad(), widened(torch.float64):
        return load(source)(*(t.double() if t.is_floating_point() else t for t in inputs))
