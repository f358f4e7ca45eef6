"""FFN gate and up: two sibling linears of one input, in one launch with two weight pointers (nothing is repacked)."""

from __future__ import annotations

from jasperk_kernels.shared.spaces import linear_space

from jasperk_inductor.contract import Family, Match
from jasperk_inductor.graph import GraphView
from jasperk_inductor.patterns import blocks, projection_flops, projections


def find(view: GraphView) -> list[Match]:
    siblings = [block.linears for block in blocks(view) if block.kind == "ffn"]
    return [match for linears in siblings if (match := projections(linears)) is not None]


FAMILY = Family("ffn_gate_up", "FFN gate / up", find, projection_flops, linear_space())
