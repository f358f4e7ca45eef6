"""jasperk: verified kernels for torch.compile.

    torch.compile(model, backend="jasperk")

swaps the hot operator families of a model for kernels that were proved correct on the model's own graph and measured to be
faster there. See the README for the whole flow, and `explain` for what was swapped and why.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "explain": "jasperk_inductor.api",
    "sites": "jasperk_inductor.api",
    "Evaluator": "jasperk_inductor.evaluate",
    "Cache": "jasperk_inductor.cache",
    "Problem": "jasperk_inductor.contract",
    "Candidate": "jasperk_inductor.contract",
    "Verdict": "jasperk_inductor.contract",
}

if TYPE_CHECKING:
    from .api import explain, sites
    from .cache import Cache
    from .contract import Candidate, Problem, Verdict
    from .evaluate import Evaluator

__all__ = ["Cache", "Candidate", "Evaluator", "Problem", "Verdict", "explain", "sites"]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: importing the package stays light, and the lab stays out of a compile."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'jasperk_inductor' has no attribute {name!r}")
