"""Test inputs: drawn by the judge from secret seeds, laid out by each worker as the Problem says.

A kernel may lean on nothing but the Problem: so rows vary within the bucket, values come in several styles (a kernel that is
only right for small positive numbers fails), and strides are as declared, with the gaps between rows poisoned.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from ..contract import Problem, Sizes, TensorSpec, bucket
from ..families import families

STYLES = ("normal", "zero_mean", "scaled", "outliers", "uniform")


def draw(problem: Problem, sizes: Sizes, style: str, seed: int, device: str) -> dict[str, torch.Tensor]:
    """One dense tensor per input role.

    Args:
        style: one of STYLES; parameters (matrices, vectors) always have trained-like values.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    family = families().get(problem.family)
    own = family.draw if family is not None else None
    drawn = {}
    for spec in problem.inputs:
        values = own(spec, sizes, generator, style) if own is not None else None
        drawn[spec.role] = values if values is not None else _draw(spec, sizes, generator, style)
    return drawn


def _draw(spec: TensorSpec, sizes: Sizes, generator: torch.Generator, style: str) -> torch.Tensor:
    shape, dtype, device = spec.shape(sizes), getattr(torch, spec.dtype), generator.device
    if not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype is torch.bool else 8, shape, generator=generator, device=device).to(dtype)
    values = torch.randn(shape, generator=generator, device=device)
    if spec.kind == "matrix":
        values *= shape[-1] ** -0.5
    elif spec.kind == "vector":
        values = values * 0.25 + 0.5
    elif style == "zero_mean":
        values -= values.mean()
    elif style == "scaled":
        values *= 8.0
    elif style == "outliers":
        values = torch.where(torch.rand(shape, generator=generator, device=device) < 2e-3, values * 40.0, values)
    elif style == "uniform":
        values = torch.rand(shape, generator=generator, device=device)
    return values.to(dtype)


def lay_out(spec: TensorSpec, dense: torch.Tensor) -> torch.Tensor:
    """A copy of `dense`, in memory of its own, in the layout of the spec; what lies between its rows is NaN."""
    shape = list(dense.shape)
    if spec.layout.startswith("pitched:"):
        wide = _poisoned([*shape[:-1], max(int(spec.layout.split(":")[1]), shape[-1])], dense)
    elif spec.layout == "strided":  # every outer size padded, and the two outermost in the other order
        wide = _poisoned([*(n + 1 for n in shape[:-1]), shape[-1] + (16 // dense.element_size() if spec.align == 16 else 1)], dense)
        wide = wide.transpose(0, 1).contiguous().transpose(0, 1) if len(shape) >= 3 else wide
    elif spec.layout == "scattered":
        wide = _poisoned([*shape[:-1], shape[-1] * 2], dense)[..., ::2]
    else:
        return dense.clone(memory_format=torch.contiguous_format)
    view = wide[tuple(slice(0, n) for n in shape)]
    view.copy_(dense)
    return view


def _poisoned(shape: list[int], like: torch.Tensor) -> torch.Tensor:
    fill = float("nan") if like.is_floating_point() else 1
    return torch.full(shape, fill, dtype=like.dtype, device=like.device)


def trial_sizes(problem: Problem, sizes: Sizes, rng: random.Random, trials: int) -> list[Sizes]:
    """Sizes to test at: the traced ones, the most and the fewest rows of the bucket, then random ones between."""
    rows = problem.rows(sizes)
    high = bucket(rows)
    low = high // 2 + 1
    targets = [rows, high, low] + [rng.randint(low, high) for _ in range(trials)]
    return [_with_rows(sizes, problem.symbols, target) for target in targets[:trials]]


def _with_rows(sizes: Sizes, symbols: tuple[str, ...], rows: int) -> Sizes:
    """Sizes with that many rows, or a few fewer: the largest symbolic size is changed, the others stay."""
    if not symbols:
        return dict(sizes)
    widest = max(symbols, key=lambda s: sizes[s])
    others = 1
    for symbol in symbols:
        others *= sizes[symbol] if symbol != widest else 1
    return {**sizes, widest: max(1, rows // others)}


def activations(problem: Problem) -> list[TensorSpec]:
    return [t for t in problem.inputs if t.kind == "activation"]


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())
