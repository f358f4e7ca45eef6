"""SiLU x gate: `silu(gate) * up`, the activation of a SwiGLU feed-forward."""

from __future__ import annotations

from jasperk_kernels.shared.spaces import flat_space

from jasperk_inductor.contract import Family, Match
from jasperk_inductor.graph import GraphView
from jasperk_inductor.patterns import elementwise_flops, lead, rms_norms, swiglu_operands


def find(view: GraphView) -> list[Match]:
    gated_norms = {norm.scaled for norm in rms_norms(view)}  # silu(gate) * norm(x) is another family
    found = []
    for product in view.all("mul"):
        operands = swiglu_operands(view, product)
        if operands is None or operands[1] in gated_norms:
            continue
        inputs, outputs = dict(zip(("gate", "up"), operands, strict=True)), {"out": view.down(product, "cast")}
        dims = {role: lead(node) for role, node in (inputs | outputs).items()}
        found.append(Match(inputs, outputs, dims))
    return found


FAMILY = Family("silu_mul", "SiLU x gate", find, elementwise_flops(6), flat_space())
