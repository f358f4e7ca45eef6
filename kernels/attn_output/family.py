"""Attention output: the linear after the token mixer, be it attention (`o_proj`) or a gated delta net (`out_proj`)."""

from __future__ import annotations

from jasperk_kernels.shared.spaces import linear_space

from jasperk_inductor.contract import Family, Match
from jasperk_inductor.graph import GraphView
from jasperk_inductor.patterns import blocks, projection_flops, projections


def find(view: GraphView) -> list[Match]:
    ends = [end for block in blocks(view) if block.kind in ("attention", "gated_delta") for end in block.ends]
    return [match for end in dict.fromkeys(ends) if (match := projections((end,))) is not None]


FAMILY = Family("attn_output", "Attention output", find, projection_flops, linear_space())
