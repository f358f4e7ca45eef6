"""Lists the kernels that CMake builds ahead of time: `python -m jasperk_inductor.languages.prebuild FOLDER`.

Every shipped C++ and CUDA C++ kernel, for the roles and types its model cards need most and the launch parameters that are tried
first. Needs neither torch nor a GPU. A binary's name is the fingerprint of its text and flags, which is where the run-time
builder looks; for C++ it also holds the processor's name, since the code uses this machine's own instructions.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..contract import Candidate, Spec, TensorSpec
from ..families import families, kernels_dir
from . import abi, bundle, cpp, cuda
from .compile import find_tool, fingerprint

_DTYPES = ("bfloat16", "float32")
_SIBLINGS = {"ffn_down": 1, "attn_output": 1, "ffn_gate_up": 2, "attn_qkv": 3, "gdn_input": 4}


def specs(family: str, dtype: str) -> list[Spec]:
    """The Specs of a family at one type, as far as the generated prelude depends on them."""

    def tensor(role: str, rank: int, kind: str = "activation") -> TensorSpec:
        return TensorSpec(role, tuple(f"r{i}" for i in range(rank - 1)) + (1,), dtype, kind=kind)

    norm = (("eps", 1e-6), ("offset", 1.0))
    if (count := _SIBLINGS.get(family)) is not None:
        inputs = [tensor("x", 3)] + [tensor(f"weight{i}", 2, "matrix") for i in range(count)]
        return [Spec(family, tuple(inputs), tuple(tensor(f"out{i}", 3) for i in range(count)))]
    if family == "residual_rmsnorm":
        inputs = [tensor("residual", 3), tensor("delta", 3), tensor("weight", 1, "vector")]
        return [Spec(family, tuple(inputs), (tensor("sum", 3), tensor("normed", 3)), norm)]
    if family == "silu_mul":
        return [Spec(family, (tensor("gate", 3), tensor("up", 3)), (tensor("out", 3),))]
    if family == "gated_rmsnorm":
        inputs = [tensor("x", 2), tensor("weight", 1, "vector"), tensor("gate", 2)]
        return [Spec(family, tuple(inputs), (tensor("out", 2),), (("eps", 1e-6), ("offset", 0.0)))]
    if family == "qk_norm_rope":
        inputs = [tensor("q", 4), tensor("q_weight", 1), tensor("k", 4), tensor("k_weight", 1), tensor("cos", 4), tensor("sin", 4)]
        names = (("eps", 1e-6), ("heads_first", True), ("k_eps", 1e-6), ("offset", 1.0), ("rotary", 64))
        return [Spec(family, tuple(inputs), (tensor("q_out", 4), tensor("k_out", 4)), names)]
    return []


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    compilers = {"cpp": find_tool("JASPERK_CXX", "g++"), "cuda": cuda.nvcc()}
    lines = []
    for family in families().values():
        for language, file, flags in (("cpp", "cpu.cpp", cpp.flags()), ("cuda", "kernel.cu", cuda.flags("-gencode=arch=compute_90a,code=sm_90a"))):
            path = kernels_dir() / family.name / file
            if not path.exists() or compilers[language] is None:
                continue
            for dtype in _DTYPES:
                for spec in specs(family.name, dtype):
                    for params in family.space[language](spec, 4)[:1]:
                        candidate = Candidate(language, bundle.read(path), tuple(params.items()))
                        text = abi.source(candidate, spec, cuda=language == "cuda")
                        name = f"{family.name}-{dtype}{path.suffix}"
                        (folder / name).write_text(text)
                        lines.append(";".join([fingerprint(text, flags), str(compilers[language]), name, " ".join(flags)]))
    (folder / "list.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
