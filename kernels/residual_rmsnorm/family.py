"""Residual + RMSNorm: `sum = residual + delta`, then the norm of the sum. Two outputs: the sum is the next residual.

Two such sums often follow each other, and the first is used by nothing but its norm and the second. Then the first site gives only
its norm, and the second adds both deltas itself: one rounding and one write less than the model has. That is how Inductor treats a
residual stream too, and rounding more often than it does would show in the logits.
"""

from __future__ import annotations

from jasperk_kernels.shared.spaces import row_space
from torch import fx

from jasperk_inductor.contract import Family, Match
from jasperk_inductor.graph import GraphView, is_tensor, value_of
from jasperk_inductor.patterns import RMSNorm, elementwise_flops, lead, rms_norms


def find(view: GraphView) -> list[Match]:
    sums = {norm.x: norm for norm in rms_norms(view) if _terms(view, norm.x) is not None}
    found = []
    unwritten: set[fx.Node] = set()
    for total, norm in sums.items():
        residual, delta = _terms(view, total)  # type: ignore[misc]
        inputs = {"residual": residual, "delta": delta, "weight": norm.weight}
        outputs = {"sum": total, "normed": norm.output}
        recomputed = ()
        if residual in unwritten or delta in unwritten:
            earlier, last = (residual, delta) if residual in unwritten else (delta, residual)
            first, second = _terms(view, earlier)  # type: ignore[misc]
            inputs = {"residual": first, "earlier": second, "delta": last, "weight": norm.weight}
            recomputed = (earlier,)
        elif _only_summed_again(view, norm, sums):
            unwritten.add(total)
            del outputs["sum"]
            recomputed = (total,)
        dims = {role: lead(node) for role, node in (inputs | outputs).items()} | {"weight": (None,)}
        constants = () if isinstance(norm.eps, float) else (norm.eps,)
        params = {"eps": norm.eps, "offset": norm.offset}
        found.append(Match(inputs, outputs, dims, {"weight": "vector"}, params, constants, recomputed))
    return found


def _terms(view: GraphView, total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Both terms of a sum of two tensors of the same shape and type."""
    if view.name(total) != "add" or total.kwargs:
        return None
    residual, delta = view.operands(total)
    if not (is_tensor(residual) and is_tensor(delta)):
        return None
    a, b = value_of(residual), value_of(delta)
    return (residual, delta) if a.shape == b.shape and a.dtype == b.dtype else None


def _only_summed_again(view: GraphView, norm: RMSNorm, sums: dict[fx.Node, RMSNorm]) -> bool:
    """Whether a sum is used by its norm and by one more normed sum, and by nothing else."""
    inside = view.between([norm.x, norm.weight, *([norm.eps] if isinstance(norm.eps, fx.Node) else [])], [norm.output])
    if isinstance(inside, fx.Node):
        return False
    others = [user for user in norm.x.users if user not in set(inside)]
    return len(others) == 1 and others[0] in sums and others[0].args != (norm.x, norm.x)


FAMILY = Family("residual_rmsnorm", "Residual + RMSNorm", find, elementwise_flops(3), row_space())
