"""Lists the kernels that CMake builds ahead of time: `python -m jasperk_inductor.languages.prebuild FOLDER`.

Every shipped C++ and CUDA C++ kernel, for what the model cards hold (traced at tiny size on the meta device, in bf16 and fp32) and
the launch parameters that are tried first. Sizes are run-time values, so a binary serves every size of a model. Its name is the
fingerprint of its text and flags, which is where the run-time builder looks; for C++ that includes the processor, since the code
uses this machine's own instructions.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..contract import Candidate
from ..families import families, kernels_dir
from . import LANGUAGES, abi, bundle, cpp, cuda
from .compile import find_tool, fingerprint

BATCH = 4  # a skinny product: what decoding a few sequences needs


def main(folder: Path) -> None:
    from ..api import Workload, distinct
    from ..models import cards

    folder.mkdir(parents=True, exist_ok=True)
    compilers = {"cpp": (find_tool("JASPERK_CXX", "g++"), cpp.flags()), "cuda": (cuda.nvcc(), cuda.flags(cuda.HOPPER))}
    lines: dict[str, str] = {}
    for name in cards():
        for dtype in ("bfloat16", "float32"):
            for site in distinct(Workload(name, "tiny", batch=BATCH, dtype=dtype).sites()):
                for language, (compiler, flags) in compilers.items():
                    path = kernels_dir() / site.family / LANGUAGES[language].file
                    if compiler is None or not path.exists():
                        continue
                    spec = site.problem.spec
                    for params in families()[site.family].space[language](spec, site.rows)[:1]:
                        candidate = Candidate(language, bundle.read(path), tuple(params.items()))
                        text = abi.source(candidate, spec, cuda=language == "cuda")
                        key = fingerprint(text, flags)
                        file = f"{site.family}-{dtype}-{key[:8]}{path.suffix}"
                        (folder / file).write_text(text)
                        lines[key] = ";".join([key, compiler, file, " ".join(flags)])
    (folder / "list.txt").write_text("\n".join(lines.values()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
