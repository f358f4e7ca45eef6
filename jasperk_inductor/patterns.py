"""Structures that recur across families: RMS norms, sibling projections, and the block between two layers of projections.

They are found by dataflow alone, not by class names: a norm is what takes `rsqrt(mean(x^2) + eps)`, siblings are linears that
share an input, and what a group of siblings belongs to (feed-forward, attention, gated delta net) is read off the operations
between it and the next linears. So a renamed class, a functional model and a graph cut by a break are all served alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .contract import Match, Problem, Sizes
from .graph import GraphView, arguments, is_tensor, value_of


@dataclass(frozen=True)
class RMSNorm:
    """`cast(cast(x) * rsqrt(mean(cast(x)^2) + eps)) * (offset + weight)`, with casts where the model has them.

    `scaled` is the product with the weight, before any final cast; `output` the last cast after it.
    """

    x: fx.Node
    weight: fx.Node
    eps: float | fx.Node
    offset: float
    scaled: fx.Node
    output: fx.Node


def _other(node: fx.Node, one: fx.Node) -> Any:
    a, b = node.args[0], node.args[1]
    return b if a is one else a


def rms_norms(view: GraphView) -> list[RMSNorm]:
    """All RMS norms over the last dimension with a weight, in graph order."""
    found = []
    for node in view.all("rsqrt"):
        if (norm := _spelt_out(view, node)) is not None:
            found.append(norm)
    for node in view.all("rms_norm"):
        x, shape, *rest = arguments(node)
        weight: Any = rest[0] if rest else node.kwargs.get("weight")
        eps = rest[1] if len(rest) > 1 else node.kwargs.get("eps")
        if is_tensor(weight) and isinstance(eps, float | fx.Node) and isinstance(shape, list | tuple) and len(shape) == 1:
            found.append(RMSNorm(view.up(x, "cast"), weight, eps, 0.0, node, view.down(node, "cast")))
    return sorted(found, key=lambda n: view.position[n.output])


def _spelt_out(view: GraphView, rsqrt: fx.Node) -> RMSNorm | None:
    total: Any = rsqrt.args[0]
    if view.name(total) != "add":
        return None
    mean, eps = view.operands(total)
    if view.name(mean) != "mean":
        mean, eps = eps, mean
    if view.name(mean) != "mean" or not isinstance(eps, float | fx.Node) or is_tensor(eps):
        return None
    assert isinstance(mean, fx.Node)
    given = arguments(mean)
    axis: Any = given[1] if len(given) > 1 else mean.kwargs.get("dim")
    axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
    keep = given[2] if len(given) > 2 else mean.kwargs.get("keepdim")
    squared = given[0]
    rank = value_of(squared).dim() if is_tensor(squared) else 0
    if axis not in (-1, rank - 1) or keep is not True:
        return None
    if (
        (view.name(squared) == "pow" and squared.args[1] in (2, 2.0))
        or view.name(squared) == "square"
        or (view.name(squared) == "mul" and squared.args[0] is squared.args[1])
    ):
        source = squared.args[0]
    else:
        return None
    products = [u for u in view.users(rsqrt, "mul") if view.up(_other(u, rsqrt), "cast") is view.up(source, "cast")]
    if len(products) != 1:
        return None
    normed = view.down(products[0], "cast")
    scaled = view.users(normed, "mul")
    if len(scaled) != 1:
        return None
    weight, offset = _weight(view, _other(scaled[0], normed))
    if weight is None or value_of(weight).dim() != 1:
        return None
    return RMSNorm(view.up(source, "cast"), weight, eps, offset, scaled[0], view.down(scaled[0], "cast"))


def _weight(view: GraphView, node: Any) -> tuple[fx.Node | None, float]:
    """(weight, offset) of `weight` or `offset + weight`, through casts."""
    node = view.up(node, "cast")
    if view.name(node) == "add":
        a, b = view.operands(node)
        a, b = (b, a) if isinstance(a, int | float) else (a, b)
        if isinstance(b, int | float) and is_tensor(weight := view.up(a, "cast")):
            return weight, float(b)
        return None, 0.0
    return (node, 0.0) if is_tensor(node) and node.op in ("placeholder", "get_attr") else (None, 0.0)


@dataclass(frozen=True)
class Block:
    """Sibling projections of one input and what lies between them and the linears that come next.

    Attributes:
        kind: "ffn" (silu(gate) * up), "attention", "gated_delta", or "" (something else).
        linears: the siblings, in graph order.
        between: every node downstream of them, up to and without `ends`.
        ends: the linears that consume the result.
    """

    kind: str
    linears: tuple[fx.Node, ...]
    between: frozenset[fx.Node]
    ends: tuple[fx.Node, ...]


def blocks(view: GraphView) -> list[Block]:
    """All groups of linears that share an input and no more than that, classified, in graph order."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in view.all("linear"):
        if isinstance(node.args[0], fx.Node) and is_tensor(node):
            groups.setdefault(node.args[0], []).append(node)
    found = []
    for linears in groups.values():
        between, ends = view.reach(linears, lambda n: view.name(n) == "linear")
        found.append(Block(_kind(view, linears, between, ends), tuple(linears), frozenset(between), tuple(ends)))
    return found


def _kind(view: GraphView, linears: list[fx.Node], between: set[fx.Node], ends: list[fx.Node]) -> str:
    if not ends:
        return ""
    names = [view.name(n) for n in between]
    if "attention" in names or ("softmax" in names and len(linears) > 1):
        return "attention"
    if "conv1d" in names and "softplus" in names:
        return "gated_delta"
    if len(linears) == 2 and any(swiglu_operands(view, n) == tuple(linears) for n in between):
        return "ffn"
    return ""


def swiglu_operands(view: GraphView, product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(gate, up) of `silu(gate) * up`, through casts; None if the node is something else."""
    if view.name(product) != "mul":
        return None
    a, b = view.operands(product)
    for activated, up in ((a, b), (b, a)):
        activated = view.up(activated, "cast")
        if view.name(activated) == "silu" and is_tensor(up):
            gate = activated.args[0]
            if is_tensor(gate) and value_of(gate).shape == value_of(up).shape:
                return view.up(gate, "cast"), view.up(up, "cast")
    return None


def linear_parts(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """(input, weight, bias) of an `F.linear` node."""
    args = [*arguments(node), None, None]
    weight: Any = args[1] if args[1] is not None else node.kwargs["weight"]
    bias: Any = args[2] if args[2] is not None else node.kwargs.get("bias")
    return args[0], weight, bias


def is_parameter_like(node: Any) -> bool:
    """Whether a node is a graph input or attribute: a weight, as far as a graph can tell."""
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr") and isinstance(value_of(node), torch.Tensor)


def lead(node: fx.Node, fixed: int = 1) -> tuple[str | None, ...]:
    """Dims of a tensor whose last `fixed` sizes are fixed and whose leading ones are rows: ("r0", "r1", None)."""
    rank = value_of(node).dim()
    return tuple(f"r{i}" for i in range(rank - fixed)) + (None,) * fixed


def projections(linears: tuple[fx.Node, ...]) -> Match | None:
    """The match of sibling linears as one problem: x, weight0, weight1, … (and biases) to out0, out1, …"""
    x = linears[0].args[0]
    assert isinstance(x, fx.Node)
    inputs, outputs, dims, kinds = {"x": x}, {}, {"x": lead(x)}, {}
    for i, linear in enumerate(linears):
        _, weight, bias = linear_parts(linear)
        if not is_parameter_like(weight) or value_of(weight).dim() != 2:
            return None
        inputs[f"weight{i}"], outputs[f"out{i}"] = weight, linear
        dims[f"weight{i}"], dims[f"out{i}"], kinds[f"weight{i}"] = (None, None), lead(linear), "matrix"
        if bias is not None:
            inputs[f"bias{i}"], dims[f"bias{i}"], kinds[f"bias{i}"] = bias, (None,), "vector"
    if len(set(inputs.values())) != len(inputs):  # tied weights: one tensor in two roles
        return None
    return Match(inputs, outputs, dims, kinds)


def projection_flops(problem: Problem, sizes: Sizes) -> float:
    """2 M N K, summed over the weights."""
    rows = problem.rows(sizes)
    return sum(2.0 * rows * t.fixed[0] * t.fixed[1] for t in problem.inputs if t.kind == "matrix")


def elementwise_flops(per_element: float) -> Callable[[Problem, Sizes], float]:
    """Work proportional to the elements of the outputs."""
    return lambda problem, sizes: per_element * sum(math.prod(t.shape(sizes)) for t in problem.outputs)
