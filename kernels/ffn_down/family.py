"""FFN down: the linear that takes `silu(gate) * up` back to the model's width. One weight, read once per token."""

from __future__ import annotations

from jasperk_kernels.shared.spaces import linear_space

from jasperk_inductor.contract import Family, Match
from jasperk_inductor.graph import GraphView
from jasperk_inductor.patterns import blocks, projection_flops, projections


def find(view: GraphView) -> list[Match]:
    ends = [end for block in blocks(view) if block.kind == "ffn" for end in block.ends]
    return [match for end in ends if (match := projections((end,))) is not None]


FAMILY = Family("ffn_down", "FFN down", find, projection_flops, linear_space())
