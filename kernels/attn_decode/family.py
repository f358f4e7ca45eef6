"""Decode attention over a static cache: one query token a sequence against the keys and values written so far.

What eager and Inductor run repeats the cached keys and values for every query head and then attends to the whole cache, however
little of it is filled. The mask says what is filled, so a kernel may leave out the blocks where it is false. The site is the
attention call and the repeating before it; writing the cache stays with the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from jasperk_inductor.contract import Family, Match, Problem, Scalar, Sizes, Spec, TensorSpec
from jasperk_inductor.graph import GraphView, is_tensor, value_of


def find(view: GraphView) -> list[Match]:
    found = []
    for node in view.all("attention"):
        q, k, v, mask = _operands(node)
        if not all(map(is_tensor, (q, k, v, mask))) or value_of(q).dim() != 4 or value_of(q).shape[2] != 1:
            continue
        k, v = _repeated(view, k), _repeated(view, v)
        if k is None or v is None or not _fits(*map(value_of, (q, k, v, mask))):
            continue
        inputs = {"q": q, "k": k, "v": v, "mask": mask}
        # The graph repeats with literal sizes, so that its text holds for this batch alone.
        dims: dict[str, tuple[str | None, ...]] = dict.fromkeys((*inputs, "out"), (None,) * 4)
        scale = node.kwargs.get("scale")
        params = {"scale": float(scale) if isinstance(scale, int | float) else float(value_of(q).shape[-1]) ** -0.5}
        found.append(Match(inputs, {"out": node}, dims, {}, params))
    return found


def _operands(node: fx.Node) -> tuple[Any, Any, Any, Any]:
    """(query, key, value, mask) of scaled_dot_product_attention without dropout or causality; Nones if it is something else."""
    args, kwargs = list(node.args), node.kwargs
    if node.target is not torch.nn.functional.scaled_dot_product_attention or len(args) > 4:
        return None, None, None, None
    if kwargs.get("dropout_p", 0.0) != 0.0 or kwargs.get("is_causal", False) or not isinstance(kwargs.get("scale"), int | float | None):
        return None, None, None, None
    names = ("query", "key", "value", "attn_mask")
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
    return given[0], given[1], given[2], given[3]


def _repeated(view: GraphView, node: fx.Node) -> fx.Node | None:
    """The tensor of (B, heads, S, D) that was repeated to every query head; itself if it was not."""
    below = view.up(node, "view", "getitem")
    return below if is_tensor(below) and value_of(below).dim() == 4 else None


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> bool:
    if mask.dtype is not torch.bool or mask.dim() != 4 or not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        return False
    same = k.shape == v.shape and k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3] and mask.shape[3] == k.shape[2]
    return same and q.shape[1] % k.shape[1] == 0 and mask.shape[1] == 1 and mask.shape[2] == 1 and mask.shape[0] == q.shape[0]


def flops(problem: Problem, sizes: Sizes) -> float:
    """Two products over the whole cache."""
    q, k = problem.inputs[0].shape(sizes), problem.inputs[1].shape(sizes)
    return 4.0 * q[0] * q[1] * k[2] * q[3]


def draw(spec: TensorSpec, sizes: Sizes, generator: torch.Generator, style: str) -> torch.Tensor | None:
    """Masks as decoding has them: the first tokens of each sequence, of different lengths; some styles leave gaps as well. In the
    style that is timed the cache is full, so that a time can be held against the bytes of the Problem: it is the worst case."""
    if spec.role != "mask":
        return None
    batch, _, _, capacity = shape = spec.shape(sizes)
    device = generator.device
    if style == "normal":
        return torch.ones(shape, dtype=torch.bool, device=device)
    length = torch.randint(1, capacity + 1, (batch, 1, 1, 1), generator=generator, device=device)
    mask = torch.arange(capacity, device=device) < length
    if style in ("zero_mean", "outliers"):
        mask = mask & (torch.rand(shape, generator=generator, device=device) < 0.7)
        mask[..., 0] = True  # a row with nothing to attend to has no value
    return mask.expand(shape).contiguous()


def _space(spec: Spec, rows: int) -> list[dict[str, Scalar]]:
    return [{"BLOCK": b, "WARPS": w, "STAGES": s} for b, w, s in ((64, 4, 1), (32, 4, 1), (128, 8, 1), (64, 8, 1), (128, 4, 1))]


FAMILY = Family("attn_decode", "Decode attention over a static cache", find, flops, {"triton": _space}, draw=draw, devices=("cuda",))
