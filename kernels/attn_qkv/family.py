"""Attention q (with its output gate, where the model has one), k and v: sibling linears in one launch."""

from __future__ import annotations

from jasperk_kernels.shared.spaces import linear_space

from jasperk_inductor.contract import Family, Match
from jasperk_inductor.graph import GraphView
from jasperk_inductor.patterns import blocks, projection_flops, projections


def find(view: GraphView) -> list[Match]:
    siblings = [block.linears for block in blocks(view) if block.kind == "attention" and len(block.linears) > 1]
    return [match for linears in siblings if (match := projections(linears)) is not None]


FAMILY = Family("attn_qkv", "Attention QKV", find, projection_flops, linear_space())
