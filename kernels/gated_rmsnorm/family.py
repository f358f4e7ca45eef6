"""GDN norm + gate: `rms_norm(x) * silu(gate)` over each head of a gated delta net's output."""

from __future__ import annotations

from jasperk_kernels.shared.spaces import head_space

from jasperk_inductor.contract import Family, Match
from jasperk_inductor.graph import GraphView, is_tensor, value_of
from jasperk_inductor.patterns import elementwise_flops, lead, rms_norms


def find(view: GraphView) -> list[Match]:
    found = []
    for norm in rms_norms(view):
        for product in view.users(norm.output, "mul"):
            a, b = view.operands(product)
            activated = view.up(b if a is norm.output else a, "cast")
            if view.name(activated) != "silu" or not is_tensor(gate := view.up(activated.args[0], "cast")):
                continue
            if value_of(gate).shape != value_of(norm.x).shape:
                continue
            inputs = {"x": norm.x, "weight": norm.weight, "gate": gate}
            outputs = {"out": view.down(product, "cast")}
            dims = {role: lead(node) for role, node in (inputs | outputs).items()} | {"weight": (None,)}
            constants = () if isinstance(norm.eps, float) else (norm.eps,)
            params = {"eps": norm.eps, "offset": norm.offset}
            found.append(Match(inputs, outputs, dims, {"weight": "vector"}, params, constants))
    return found


FAMILY = Family("gated_rmsnorm", "GDN norm + gate", find, elementwise_flops(10), head_space())
