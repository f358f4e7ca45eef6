"""The fixed top-level folders as import packages.

`kernels/`, `models/` and `bench_e2e/` are installed as `jasperk_kernels`, `jasperk_models` and `jasperk_bench`, because a package
named `kernels` would take the place of Hugging Face's, which transformers imports. In a checkout that is not installed the same
names are made importable here.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from pathlib import Path

from .errors import UnknownName

FOLDERS = {"jasperk_kernels": "kernels", "jasperk_models": "models", "jasperk_bench": "bench_e2e"}


@functools.cache
def package(name: str) -> Path:
    """The folder behind one of these packages, which can be imported from then on.

    Raises:
        UnknownName: neither installed nor beside this package.
    """
    spec = importlib.util.find_spec(name)
    places = [Path(p) for p in (spec.submodule_search_locations or [])] if spec is not None else []
    beside = Path(__file__).resolve().parent.parent / FOLDERS[name]
    folder = next((p for p in [*places, beside] if any(p.glob("*.py")) or any(p.glob("*/*.py"))), None)
    if folder is None:
        raise UnknownName(f"the folder {FOLDERS[name]}/ is not there and {name} is not installed; run `pip install -e .` in the checkout.")
    if spec is None:
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
    return folder
