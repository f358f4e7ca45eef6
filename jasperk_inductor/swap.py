"""Putting verified kernels into a graph, as functional operators.

Every swapped problem becomes one operator `jasperk::<family>_<sha12>`. The name is a hash of what it computes and of the kernels
behind it, so torch's own FX and AOT caches tell two kernels apart without being told. Inside, the kernel is chosen by the actual
number of rows at run time; where none has been verified for that number the user's own subgraph runs, and is counted. Outputs are
always new and contiguous, and the fake says so.

This file knows no operator by name.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from . import reference
from .contract import Problem, Site, bucket, digest
from .languages import Kernel

NAMESPACE = "jasperk"
VERSION = 1  # of what an operator does around its kernel

fallbacks: collections.Counter[str] = collections.Counter()  # operator -> calls that ran the subgraph instead of a kernel

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_defined: dict[str, Operator] = {}
_lock = threading.Lock()


@dataclass
class Operator:
    """One registered operator: its Problem, and the kernel for each bucket of rows.

    With no kernels at all it is the identity swap: the site's own subgraph behind an operator.
    """

    name: str
    problem: Problem
    kernels: Mapping[int, Kernel]
    call: torch._ops.OpOverload = field(init=False)
    _reference: Callable[..., tuple[torch.Tensor, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._reference = reference.load(self.problem.reference)
        inputs = self.problem.inputs
        self._where = [
            next((i, d) for i, t in enumerate(inputs) for d, s in enumerate(t.dims) if s == symbol) for symbol in self.problem.symbols
        ]
        self._checks = [(i, t.layout == "contiguous", t.align == 16) for i, t in enumerate(inputs)]
        self._single = len(self.problem.outputs) == 1

    def run(self, *inputs: torch.Tensor) -> Any:
        """The operator's implementation on a device."""
        rows = 1
        for i, d in self._where:
            rows *= inputs[i].shape[d]
        kernel = self.kernels.get(bucket(rows))
        if kernel is None:
            outputs = self.fall_back(*inputs)
        else:
            for i, contiguous, aligned in self._checks:
                tensor = inputs[i]
                if (contiguous and not tensor.is_contiguous()) or (aligned and tensor.data_ptr() & 15):
                    inputs = self._straighten(inputs)
                    break
            first = inputs[0]
            if first.is_cuda and first.get_device() != torch.cuda.current_device():
                with torch.cuda.device(first.device):
                    outputs = kernel(*inputs)
            else:
                outputs = kernel(*inputs)
        return outputs[0] if self._single else outputs

    def fall_back(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The user's own subgraph; new, contiguous outputs."""
        if self.kernels:
            fallbacks[self.name] += 1
        outputs = self._reference(*inputs)
        ranges = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in inputs]
        return tuple(
            t.clone(memory_format=torch.contiguous_format)
            if not t.is_contiguous() or any(a <= t.data_ptr() < a + n for a, n in ranges if n)
            else t
            for t in outputs
        )

    def _straighten(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Inputs in the layout the kernel was verified for, copied where they are not."""
        given = list(inputs)
        for i, contiguous, aligned in self._checks:
            tensor = given[i]
            if (contiguous and not tensor.is_contiguous()) or (aligned and tensor.data_ptr() & 15):
                given[i] = tensor.clone(memory_format=torch.contiguous_format)
        return tuple(given)

    def fake(self, *inputs: torch.Tensor) -> Any:
        """Shapes, types and strides of the outputs; sizes may be symbolic."""
        sizes = {s: inputs[i].shape[d] for s, (i, d) in zip(self.problem.symbols, self._where, strict=True)}
        outputs = tuple(torch.empty(t.shape(sizes), dtype=getattr(torch, t.dtype), device=inputs[0].device) for t in self.problem.outputs)
        return outputs[0] if self._single else outputs


def operator(problem: Problem, kernels: Mapping[int, tuple[str, Kernel]]) -> Operator:
    """The operator for a problem and these kernels, registered if it is not yet.

    Args:
        kernels: bucket of rows -> (hash of the entry, kernel). Empty: the identity swap.
    """
    content = digest([VERSION, problem.hash, sorted((b, h) for b, (h, _) in kernels.items())])
    name = f"{problem.family}_{content[:12]}"
    with _lock:
        if name in _defined:
            return _defined[name]
        made = Operator(name, problem, {b: k for b, (_, k) in kernels.items()})
        arguments = ", ".join(f"Tensor {t.role}" for t in problem.inputs)
        results = "Tensor" if len(problem.outputs) == 1 else f"({', '.join(['Tensor'] * len(problem.outputs))})"
        _library.define(f"{name}({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _library.impl(name, made.run, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", made.fake, lib=_library)
        made.call = getattr(getattr(torch.ops, NAMESPACE), name).default
        _defined[name] = made
        return made


def apply(graph: fx.Graph, chosen: Sequence[tuple[Site, Operator]]) -> None:
    """Rewrites the graph: each site becomes one call of its operator.

    All calls are placed first, while every node that marks a place is still there; then uses move over, then the old nodes go.
    """
    calls = []
    for site, op in chosen:
        with graph.inserting_before(site.before):
            call = graph.call_function(op.call, site.inputs)
            call.meta["nn_module_stack"] = site.outputs[-1].meta.get("nn_module_stack", {})
            results = [call]
            if len(site.outputs) > 1:
                results = [graph.call_function(getitem, (call, i)) for i in range(len(site.outputs))]
        calls.append(results)
    for (site, _), results in zip(chosen, calls, strict=True):
        for old, new in zip(site.outputs, results, strict=True):
            new.meta.update({k: v for k, v in old.meta.items() if k in ("example_value", "val", "nn_module_stack", "stack_trace")})
            old.replace_all_uses_with(new)
    for site, _ in chosen:
        for node in reversed(site.nodes):
            if node.op not in ("placeholder", "get_attr") and not node.users:
                graph.erase_node(node)
    graph.lint()


def random_inputs(problem: Problem, sizes: Mapping[str, int], device: Any) -> list[torch.Tensor]:
    """Random inputs for a first call or a quick check; the global random state is left alone."""
    generator = torch.Generator(device=device).manual_seed(0)
    made = []
    for spec in problem.inputs:
        tensor = torch.randn(spec.shape(sizes), generator=generator, device=device)
        scale = spec.fixed[-1] ** -0.5 if spec.kind == "matrix" else 1.0
        made.append((tensor * scale).to(getattr(torch, spec.dtype)))
    return made


def first_call(op: Operator, sizes: Mapping[str, int], device: Any) -> None:
    """Runs the operator's kernels once, so that nothing is compiled or loaded during a CUDA-graph capture."""
    with torch.no_grad():
        op.run(*random_inputs(op.problem, sizes, device))


def agrees(op: Operator, sizes: Mapping[str, int], device: Any) -> str | None:
    """Checks an operator against its own subgraph on random inputs; None if they agree, else in words how they differ."""
    inputs = random_inputs(op.problem, sizes, device)
    with torch.no_grad():
        got = op.run(*inputs)
        got = (got,) if isinstance(got, torch.Tensor) else got
        wanted = reference.load(op.problem.reference)(*inputs)
        exact = reference.exact(op.problem.reference, inputs)
    for spec, a, b, e in zip(op.problem.outputs, got, wanted, exact, strict=True):
        scale = float(torch.linalg.vector_norm(e)) or 1.0
        mine, theirs = (float(torch.linalg.vector_norm(t.double() - e)) / scale for t in (a, b))
        allowed = (op.problem.tolerance.fp64_factor or 2.0) * theirs + torch.finfo(a.dtype).eps
        if not mine <= allowed or not math.isfinite(mine):
            return f"{spec.role} is {mine:.3g} from float64, its subgraph {theirs:.3g}"
    return None
