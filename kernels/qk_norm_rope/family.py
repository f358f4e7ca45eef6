"""Q/K norm + RoPE: RMSNorm of every query and key head, rotary position embedding over the first `rotary` channels, and the
packing to (B, H, S, D) that attention wants. Query and key together, in one launch."""

from __future__ import annotations

from typing import NamedTuple

from jasperk_kernels.shared.spaces import head_space
from torch import fx

from jasperk_inductor.contract import Family, Match
from jasperk_inductor.graph import GraphView, is_tensor, value_of
from jasperk_inductor.patterns import RMSNorm, elementwise_flops, rms_norms


class Rotated(NamedTuple):
    norm: RMSNorm
    cos: fx.Node
    sin: fx.Node
    output: fx.Node
    heads_first: bool  # whether the norm's (B, S, H, D) is transposed to (B, H, S, D)


def find(view: GraphView) -> list[Match]:
    found, waiting = [], {}
    for norm in rms_norms(view):
        if value_of(norm.x).dim() != 4 or (rotated := _rotated(view, norm)) is None:
            continue
        key = (rotated.cos, rotated.sin, rotated.heads_first)
        if (first := waiting.pop(key, None)) is None:
            waiting[key] = rotated
        elif (match := _pair(first, rotated)) is not None:
            found.append(match)
    return found


def _pair(q: Rotated, k: Rotated) -> Match | None:
    if q.norm.offset != k.norm.offset:
        return None
    inputs = {"q": q.norm.x, "q_weight": q.norm.weight, "k": k.norm.x, "k_weight": k.norm.weight, "cos": q.cos, "sin": q.sin}
    outputs = {"q_out": q.output, "k_out": k.output}
    batch, length = value_of(q.norm.x).shape[:2]
    out = ("r0", None, "r1", None) if q.heads_first else ("r0", "r1", None, None)
    table = value_of(q.cos).shape
    if len(table) != 4 or table != value_of(q.sin).shape:
        return None
    rows, heads = (2, 1) if q.heads_first else (1, 2)
    if table[heads] != 1 or table[rows] != length or table[0] not in (1, batch):
        return None
    table_dims: list[str | None] = [None] * 4
    table_dims[rows] = "r1"
    table_dims[0] = "r0" if table[0] == batch else None
    constants = tuple(eps for eps in (q.norm.eps, k.norm.eps) if isinstance(eps, fx.Node))
    dims = {
        "q": ("r0", "r1", None, None), "k": ("r0", "r1", None, None), "q_weight": (None,), "k_weight": (None,),
        "cos": tuple(table_dims), "sin": tuple(table_dims), "q_out": out, "k_out": out,
    }  # fmt: skip
    params = {
        "eps": q.norm.eps, "k_eps": k.norm.eps, "offset": q.norm.offset, "heads_first": q.heads_first,
        "rotary": int(table[3]),
    }  # fmt: skip
    return Match(inputs, outputs, dims, {"q_weight": "vector", "k_weight": "vector"}, params, constants)


def _rotated(view: GraphView, norm: RMSNorm) -> Rotated | None:
    """Follows a norm through an optional transpose to `cat(rot * cos + cat(-rot2, rot1) * sin, pass)`."""
    heads = norm.output
    transposed = [u for u in view.users(heads, "view") if u.target == "transpose" and set(u.args[1:]) in ({1, 2}, {-2, -3})]
    if len(heads.users) == 1 and transposed:
        heads = transposed[0]
    for rot in [u for u in view.users(heads, "getitem") if _is_head_slice(u)] + [heads]:
        for product in view.users(rot, "mul"):
            a, b = view.operands(product)
            cos = b if a is rot else a
            for total in view.users(product, "add"):
                a, b = view.operands(total)
                other = b if a is product else a
                sin = _rotate_half_times(view, other, rot)
                if sin is None or not is_tensor(cos):
                    continue
                output = view.down(total, "cast")
                if rot is not heads:
                    joined = [u for u in view.users(output, "cat") if u.args and u.args[0][0] is output and len(u.args[0]) == 2]
                    if len(joined) != 1:
                        continue
                    output = joined[0]
                return Rotated(norm, cos, sin, output, bool(transposed) and heads is transposed[0])
    return None


def _is_head_slice(node: fx.Node) -> bool:
    """`x[..., :n]`"""
    index = node.args[1]
    last = index[-1] if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis else None
    return isinstance(last, slice) and last.start in (None, 0) and isinstance(last.stop, int)


def _rotate_half_times(view: GraphView, node: object, rot: fx.Node) -> fx.Node | None:
    """sin, if `node` is `cat((-rot[..., h:], rot[..., :h])) * sin`."""
    if view.name(node) != "mul":
        return None
    a, b = view.operands(node)  # type: ignore[arg-type]
    for turned, sin in ((a, b), (b, a)):
        if view.name(turned) == "cat" and len(turned.args[0]) == 2 and is_tensor(sin):
            negative, positive = turned.args[0]
            halves = view.name(negative) == "neg" and view.name(positive) == "getitem" and positive.args[0] is rot
            if halves and view.name(negative.args[0]) == "getitem" and negative.args[0].args[0] is rot:
                return sin
    return None


FAMILY = Family("qk_norm_rope", "Q/K norm + RoPE", find, elementwise_flops(12), head_space())
