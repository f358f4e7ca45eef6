"""Finds the operator families: every folder of `kernels/` that holds a `family.py`.

A family file defines one `FAMILY`. Nothing is registered by hand: to add a family, add its folder.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path

from .contract import Family
from .errors import UnknownName, nearest

PACKAGE = "jasperk_kernels"


@functools.cache
def kernels_dir() -> Path:
    """The folder that holds the families: `kernels/` of the checkout, or `jasperk_kernels` of an installed wheel."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in (*places, Path(__file__).resolve().parent.parent / "kernels"):
        if any(Path(place).glob("*/family.py")):
            return Path(place)
    raise UnknownName(f"no kernel families found; {PACKAGE} is not installed. Run `pip install -e .` in the checkout.")


def _importable() -> None:
    """Makes `jasperk_kernels` importable in a checkout that is not installed. Never as `kernels`: transformers imports
    Hugging Face's package of that name."""
    if PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE) is None:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [str(kernels_dir())]
        sys.modules[PACKAGE] = package


@functools.cache
def families() -> dict[str, Family]:
    """Every family by name, in the order of their folders' names."""
    _importable()
    found = {}
    for path in sorted(kernels_dir().glob("*/family.py")):
        family = importlib.import_module(f"{PACKAGE}.{path.parent.name}.family").FAMILY
        if family.name != path.parent.name:
            raise UnknownName(f"{path} defines family {family.name!r}; it must bear its folder's name {path.parent.name!r}.")
        found[family.name] = family
    return found


def family(name: str) -> Family:
    """The family of that name.

    Raises:
        UnknownName: there is none; the message names the nearest.
    """
    try:
        return families()[name]
    except KeyError:
        raise UnknownName(f"no operator family {name!r}.{nearest(name, families())}") from None
