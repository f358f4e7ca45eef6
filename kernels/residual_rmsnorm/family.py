"""Residual + RMSNorm: `sum = residual + delta`, then the norm of the sum. Two outputs: the sum is the next residual."""

from __future__ import annotations

from jasperk_kernels.shared.spaces import row_space

from jasperk_inductor.contract import Family, Match
from jasperk_inductor.graph import GraphView, is_tensor, value_of
from jasperk_inductor.patterns import elementwise_flops, lead, rms_norms


def find(view: GraphView) -> list[Match]:
    found = []
    for norm in rms_norms(view):
        total = norm.x
        if view.name(total) != "add" or total.kwargs:
            continue
        residual, delta = view.operands(total)
        if not (is_tensor(residual) and is_tensor(delta)) or value_of(residual).shape != value_of(delta).shape:
            continue
        inputs = {"residual": residual, "delta": delta, "weight": norm.weight}
        outputs = {"sum": total, "normed": norm.output}
        dims = {role: lead(node) for role, node in (inputs | outputs).items()} | {"weight": (None,)}
        constants = () if isinstance(norm.eps, float) else (norm.eps,)
        params = {"eps": norm.eps, "offset": norm.offset}
        found.append(Match(inputs, outputs, dims, {"weight": "vector"}, params, constants))
    return found


FAMILY = Family("residual_rmsnorm", "Residual + RMSNorm", find, elementwise_flops(3), row_space())
