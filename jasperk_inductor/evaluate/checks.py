"""Comparing a candidate's outputs with the reference's. The judge's own work, on data it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..contract import Accuracy, Sizes, Spec, Status, Tolerance

_CHUNK = 1 << 24  # elements compared at a time, so that a check never needs much memory

_ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Compared:
    """Sums over one output."""

    right: int
    count: int
    l1: float
    l2: float
    max_abs: float
    worst: tuple[float, float]  # the candidate's and the reference's value there


def structure(spec: Spec, sizes: Sizes, outputs: Sequence[dict], names: Sequence[str]) -> tuple[Status, str] | None:
    """Checks number, shapes, types and strides of what a worker says it returned: dicts with shape, dtype, stride."""
    if len(outputs) != len(spec.outputs):
        return Status.WRONG_STRUCTURE, f"{len(outputs)} outputs instead of {len(spec.outputs)} ({', '.join(names)})"
    for wanted, got in zip(spec.outputs, outputs, strict=True):
        shape = list(wanted.shape(sizes))
        if got["shape"] != shape:
            return Status.WRONG_SHAPE, f"{wanted.role} is {got['shape']}, must be {shape}"
        if got["dtype"] != wanted.dtype:
            return Status.WRONG_DTYPE, f"{wanted.role} is {got['dtype']}, must be {wanted.dtype}"
        dense = list(torch.empty(shape, device="meta").stride())
        if wanted.layout == "contiguous" and any(a != b and n > 1 for a, b, n in zip(got["stride"], dense, shape, strict=True)):
            return Status.WRONG_STRIDES, f"{wanted.role} has strides {got['stride']}, must be contiguous {dense}"
    return None


def compare(
    output: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance, exact: torch.Tensor | None = None
) -> Compared | tuple[Status, str]:
    """Compares in chunks, in float64; a value that is not finite must be so in the reference too.

    An element is right if it is near the reference's or near the exact one: where the reference rounds in the middle and its terms
    then cancel, a kernel that does not may be far from it and nearer to the truth.
    """
    right, l1, n1, l2, n2, largest, worst = 0, 0.0, 0.0, 0.0, 0.0, 0.0, (0.0, 0.0)
    flat, wanted = output.reshape(-1), reference.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        a, b = flat[start : start + _CHUNK].double(), wanted[start : start + _CHUNK].double()
        finite = torch.isfinite(b)
        if not torch.equal(torch.isfinite(a), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
            return Status.NOT_FINITE, "NaN or infinity where the reference has none"
        a, b = a[finite], b[finite]
        if not a.numel():
            continue
        error = (a - b).abs()
        near = error <= tolerance.atol + tolerance.rtol * b.abs()
        if exact is not None:
            e = exact.reshape(-1)[start : start + _CHUNK].double()[finite]
            near |= (a - e).abs() <= tolerance.atol + tolerance.rtol * e.abs()
        right += int(near.sum())
        l1, n1 = l1 + float(error.sum()), n1 + float(b.abs().sum())
        l2, n2 = l2 + float((error * error).sum()), n2 + float((b * b).sum())
        at = int(error.argmax())
        if float(error[at]) >= largest:
            largest, worst = float(error[at]), (float(a[at]), float(b[at]))
    count = max(1, flat.numel())
    tiny = 1e-30
    return Compared(right, count, l1 / max(n1, tiny), math.sqrt(l2 / max(n2, tiny)), largest, worst)


def far(output: torch.Tensor, exact: torch.Tensor) -> float:
    """||output - exact|| / ||exact|| in float64."""
    exact = exact.double()
    return float(torch.linalg.vector_norm(output.double() - exact) / torch.linalg.vector_norm(exact).clamp_min(1e-30))


def judge_outputs(
    spec: Spec,
    tolerance: Tolerance,
    outputs: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor] | None = None,
    inductor: Sequence[torch.Tensor] | None = None,
) -> tuple[Status, str, Accuracy]:
    """The verdict on one set of outputs, and its error figures.

    Args:
        eager, inductor: the reference in the model's types; exact: in float64 (None: not asked).
    """
    within, l1, l2, max_abs = 1.0, 0.0, 0.0, 0.0
    fp64 = eager64 = inductor64 = None
    problems: list[tuple[Status, str]] = []
    for i, wanted in enumerate(spec.outputs):
        compared = compare(outputs[i], eager[i], tolerance, exact[i] if exact is not None else None)
        if isinstance(compared, tuple):
            return compared[0], f"{wanted.role}: {compared[1]}", Accuracy(0.0, math.inf, math.inf, math.inf)
        share = compared.right / compared.count
        within, l1, l2 = min(within, share), max(l1, compared.l1), max(l2, compared.l2)
        max_abs = max(max_abs, compared.max_abs)
        got, ref = compared.worst
        where = f"{wanted.role}: worst element {got:.6g}, reference {ref:.6g}"
        if not outputs[i].is_floating_point():
            if share < 1.0:
                problems.append((Status.MISMATCH, f"{1 - share:.2%} of the elements differ; {where}"))
            continue
        if share < tolerance.within:
            problems.append((Status.MISMATCH, f"only {share:.2%} of the elements within tolerance; {where}"))
        elif compared.l1 > tolerance.l1 or compared.l2 > tolerance.l2:
            problems.append((Status.MISMATCH, f"relative error L1 {compared.l1:.3g}, L2 {compared.l2:.3g}; {where}"))
        elif exact is not None and tolerance.fp64_factor is not None:
            mine, theirs = far(outputs[i], exact[i]), far(eager[i], exact[i])
            third = far(inductor[i], exact[i]) if inductor is not None else 0.0
            fp64, eager64, inductor64 = max(fp64 or 0.0, mine), max(eager64 or 0.0, theirs), max(inductor64 or 0.0, third)
            # Half a rounding of the output is what many elements show on average; over a few, either side may just be lucky.
            luck = 1.0 + 4.0 / math.sqrt(max(1, outputs[i].numel()))
            allowed = luck * (tolerance.fp64_factor * max(theirs, third) + _ROUNDING.get(outputs[i].dtype, 0.0) / 2)
            if not mine <= allowed:
                problems.append((Status.LESS_ACCURATE, f"{wanted.role}: error {mine:.3g} against float64, allowed {allowed:.3g}"))
    accuracy = Accuracy(within, l1, l2, max_abs, fp64, eager64, inductor64 if inductor is not None else None)
    return (*problems[0], accuracy) if problems else (Status.PASSED, "", accuracy)


def worse(a: Accuracy | None, b: Accuracy) -> Accuracy:
    """The worse of two, figure by figure."""
    if a is None:
        return b

    def most(x: float | None, y: float | None) -> float | None:
        return max((v for v in (x, y) if v is not None), default=None)

    return Accuracy(
        min(a.within, b.within), max(a.l1, b.l1), max(a.l2, b.l2), max(a.max_abs, b.max_abs),
        most(a.fp64, b.fp64), most(a.eager_fp64, b.eager_fp64), most(a.inductor_fp64, b.inductor_fp64),
    )  # fmt: skip
