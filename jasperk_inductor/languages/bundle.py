"""Reads a shipped kernel as one self-contained text.

Families share code (the skinny GEMM, the SIMD helpers), yet a candidate must be one text that can be hashed, cached and moved.
So `#include "../shared/x.h"` in C++ and `from jasperk_kernels.shared.x import ...` in Python are replaced by the file's text.
"""

from __future__ import annotations

import re
from pathlib import Path

_INCLUDE = re.compile(r'^#include "([^"]+)"[ \t]*$', re.MULTILINE)
_IMPORT = re.compile(r"^from jasperk_kernels\.shared\.(\w+) import .*$", re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import .*\n", re.MULTILINE)


def read(path: Path) -> str:
    """The text of a kernel file with its shared parts inlined, each once."""
    return _inline(path, set())


def _inline(path: Path, seen: set[Path]) -> str:
    path = path.resolve()
    if path in seen:
        return ""
    seen.add(path)
    text = path.read_text()
    if path.suffix == ".py":
        shared = path.parent.parent / "shared"
        text = _FUTURE.sub("", _IMPORT.sub(lambda m: _inline(shared / f"{m[1]}.py", seen), text))
        return text
    return _INCLUDE.sub(lambda m: _inline(path.parent / m[1], seen), text)
