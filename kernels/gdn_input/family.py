"""Gated delta net input: the sibling linears qkv, z, b, a in one launch. b and a are a few dozen rows each and cost a whole
kernel launch of their own otherwise."""

from __future__ import annotations

from jasperk_kernels.shared.spaces import linear_space

from jasperk_inductor.contract import Family, Match
from jasperk_inductor.graph import GraphView
from jasperk_inductor.patterns import blocks, projection_flops, projections


def find(view: GraphView) -> list[Match]:
    siblings = [block.linears for block in blocks(view) if block.kind == "gated_delta" and len(block.linears) > 1]
    return [match for linears in siblings if (match := projections(linears)) is not None]


FAMILY = Family("gdn_input", "GDN input", find, projection_flops, linear_space())
