"""Launch parameters worth trying, by kind of kernel and language, best guess first.

Each is a function of the Spec and the rows (M), because what fits one row does not fit a thousand. The library optimizer takes
them in order until its budget is spent; tuned entries of a device come before all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jasperk_inductor.contract import Scalar, Spec

Space = Mapping[str, Callable[[Spec, int], list[dict[str, Scalar]]]]


def linear_space() -> Space:
    """Skinny matrix products: a few rows times weights that are read once."""
    return {"triton": _linear_triton, "cuda": _linear_cuda, "cpp": _linear_cpp}


def _linear_triton(spec: Spec, rows: int) -> list[dict[str, Scalar]]:
    if rows == 1:
        shapes = [(1, 16, 512, 4, 1), (1, 16, 256, 4, 1), (1, 8, 512, 4, 1), (1, 8, 1024, 4, 1), (1, 4, 1024, 4, 1), (1, 32, 256, 4, 1)]
        shapes += [(16, 64, 128, 4, 4), (16, 32, 256, 4, 4)]
    elif rows <= 16:
        shapes = [(16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (16, 16, 256, 4, 4), (16, 64, 256, 4, 3), (16, 32, 128, 4, 5)]
        shapes += [(16, 16, 512, 4, 3), (16, 128, 64, 4, 5), (16, 64, 128, 8, 4)]
    elif rows <= 64:
        tile = 32 if rows <= 32 else 64
        shapes = [(tile, 64, 128, 4, 4), (tile, 32, 128, 4, 4), (tile, 64, 64, 4, 5), (tile, 128, 64, 4, 4)]
    else:
        shapes = [(128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4)]
    wide = any(t.dtype == "float32" for t in spec.inputs)
    shapes = [(m, n, k // 2 if wide else k, w, s) for m, n, k, w, s in shapes]
    return [{"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "WARPS": w, "STAGES": s} for m, n, k, w, s in shapes]


def _linear_cuda(spec: Spec, rows: int) -> list[dict[str, Scalar]]:
    tensor = [{"TENSOR": 1, "WARPS": w, "UNROLL": u, "EARLY": 0} for w, u in ((8, 4), (4, 4), (8, 2), (4, 8), (4, 2), (8, 8))]
    plain = [{"TENSOR": 0, "ROWS": r, "WARPS": w, "EARLY": 0} for r, w in ((4, 4), (2, 4), (4, 2), (4, 8), (2, 2))]
    if spec.inputs[0].dtype == "float32":
        return plain if rows <= 8 else []
    return (plain + tensor if rows <= 4 else tensor + plain if rows <= 8 else tensor) if rows <= 32 else []


def _linear_cpp(spec: Spec, rows: int) -> list[dict[str, Scalar]]:
    if rows == 1:
        return [{"TILE_M": 1, "TILE_N": n} for n in (4, 8)]
    return [{"TILE_M": m, "TILE_N": n} for m, n in ((4, 4), (2, 8), (4, 6), (6, 4))]


def row_space() -> Space:
    """One long row at a time: norms over the model's width. SUM says whether the sum is an output too."""
    return {
        "triton": lambda spec, rows: [{"SUM": int(spec.outputs[0].role == "sum"), "WARPS": w} for w in (8, 4, 16)],
        "cuda": lambda spec, rows: [{"THREADS": t, "EARLY": 0} for t in (640, 1024, 512, 320)],
        "cpp": lambda spec, rows: [{"GRAIN": g} for g in (8192, 65536)],
    }


def flat_space() -> Space:
    """Element by element."""
    return {
        "cuda": lambda spec, rows: [{"THREADS": t, "EARLY": 0} for t in (256, 128, 512)],
        "triton": lambda spec, rows: [{"BLOCK": b, "WARPS": w} for b, w in ((1024, 4), (512, 4), (2048, 8), (256, 2))],
        "cpp": lambda spec, rows: [{"GRAIN": g} for g in (4096, 32768)],
    }


def head_space() -> Space:
    """Many short rows: one head each."""
    return {
        "cuda": lambda spec, rows: [{"HEADS": h, "EARLY": 0} for h in (4, 1, 2, 8)],
        "triton": lambda spec, rows: [{"HEADS": h, "WARPS": w} for h, w in ((4, 4), (1, 1), (8, 4), (2, 2), (1, 4))],
        "cpp": lambda spec, rows: [{"GRAIN": g} for g in (4096, 32768)],
    }
