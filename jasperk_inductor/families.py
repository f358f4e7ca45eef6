"""Finds the operator families: every folder of `kernels/` that holds a `family.py`.

A family file defines one `FAMILY`. Nothing is registered by hand: to add a family, add its folder.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from .contract import Family
from .errors import UnknownName, nearest
from .folders import package


def kernels_dir() -> Path:
    """The folder that holds the families: `kernels/` of the checkout, or `jasperk_kernels` of an installed wheel."""
    return package("jasperk_kernels")


@functools.cache
def families() -> dict[str, Family]:
    """Every family by name, in the order of their folders' names."""
    found = {}
    for path in sorted(kernels_dir().glob("*/family.py")):
        family = importlib.import_module(f"jasperk_kernels.{path.parent.name}.family").FAMILY
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
