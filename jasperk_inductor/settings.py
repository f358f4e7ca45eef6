"""Every environment variable and every compile option, in one place.

Options arrive through `torch.compile(model, backend="jasperk", options={...})`. They are checked once, here, so that a
misspelt key fails loudly instead of silently compiling something else.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import UnknownOption, nearest

ENVIRONMENT = {
    "JASPERK_CACHE_DIR": "where verified kernels are kept (default: $XDG_CACHE_HOME/jasperk or ~/.cache/jasperk)",
    "JASPERK_CXX": "the C++ compiler (default: $CXX, then g++)",
    "JASPERK_NVCC": "the CUDA compiler (default: $CUDA_HOME/bin/nvcc, then nvcc on the PATH)",
    "JASPERK_LOG": "log level of the `jasperk` logger: DEBUG, INFO, WARNING (default), ERROR",
}

BEAT = ("inductor", "eager")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def default_cache_dir() -> Path:
    """The cache directory when neither an option nor JASPERK_CACHE_DIR names one."""
    if named := os.environ.get("JASPERK_CACHE_DIR"):
        return _folder(named, "JASPERK_CACHE_DIR")
    return _folder(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "XDG_CACHE_HOME") / "jasperk"


def _folder(given: str | os.PathLike[str], what: str) -> Path:
    """An absolute path: a later change of the working directory moves nothing."""
    if not os.fspath(given):
        raise UnknownOption(f"{what} is empty; name a folder.")
    try:
        return Path(given).expanduser().absolute()
    except RuntimeError as error:
        raise UnknownOption(f"{what} is {os.fspath(given)!r}: {error}; name a folder that exists or can be made.") from error


def log_level() -> str | None:
    """The level that JASPERK_LOG asks for; None if it asks for none, or for one that does not exist (which is said once)."""
    given = os.environ.get("JASPERK_LOG", "").upper()
    if not given or given in logging.getLevelNamesMapping():
        return given or None
    warnings.warn(f"JASPERK_LOG={given.lower()!r} is no level; use one of {', '.join(LEVELS)}", stacklevel=2)
    return None


@dataclass(frozen=True)
class Options:
    """The options of `torch.compile(..., backend="jasperk", options={...})`.

    Attributes:
        cache_dir: the kernel cache to read and, if an optimizer runs, to fill.
        families: names of the families allowed to swap, e.g. ["ffn_down"]; or {"ffn_down": False} to switch some off.
            None: all. (Letters belong to a model card; `jasperk bench` and `jasperk trace` show both.)
        optimizer: "library" (search the shipped kernels), or "none" (only what the cache already holds).
        budget_s: seconds that one compile may spend on the optimizer. What is still missing then is Kept.
        beat: what a kernel must beat to be swapped in: "inductor" (what would run there otherwise) or "eager".
        mode: Inductor's mode: "default", "reduce-overhead" (CUDA graphs), "max-autotune", …
        inductor: further Inductor config patches, e.g. {"max_autotune": True}.
        verify: re-check every swapped kernel against its own subgraph, on random inputs, at compile time.
        strict: raise on any failure of ours instead of compiling the pristine graph.
        identity: swap every site for an op that runs the site's own subgraph; proves the plumbing, gains nothing.
    """

    cache_dir: Path = field(default_factory=default_cache_dir)
    families: Mapping[str, bool] | tuple[str, ...] | None = None
    optimizer: str = "library"
    budget_s: float = 60.0
    beat: str = "inductor"
    mode: str = "default"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    verify: bool = False
    strict: bool = False
    identity: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Checks a plain mapping. `mode` is torch.compile's own keyword; both at once must agree.

        Raises:
            UnknownOption: an unknown key, or a value of the wrong kind; the message names the nearest key.
        """
        given = dict(given or {})
        known = {f.name for f in dataclasses.fields(cls)}
        if wrong := [k for k in given.get("inductor") or () if not isinstance(k, str)]:
            raise UnknownOption(f"option 'inductor' names Inductor's settings; {wrong[0]!r} is no name.")
        for key in given:
            if key not in known:
                raise UnknownOption(f"jasperk has no option {key!r}.{nearest(str(key), known)}")
        if mode is not None:
            if given.setdefault("mode", mode) != mode:
                raise UnknownOption(f"mode={mode!r} and options['mode']={given['mode']!r} disagree; give one of them.")
        for key, kinds in _KINDS.items():
            if (
                key in given
                and not (given[key] is None and key == "families")
                and (not isinstance(given[key], kinds) or (isinstance(given[key], bool) and bool not in kinds))
            ):
                wanted = " or ".join(k.__name__ for k in kinds)
                raise UnknownOption(f"option {key!r} must be {wanted}, not {type(given[key]).__name__} ({given[key]!r}).")
        if not 0 <= given.get("budget_s", 0) <= math.inf:
            raise UnknownOption(f"option 'budget_s' is a number of seconds, at least 0, not {given['budget_s']!r}.")
        if given.get("beat", "eager") not in BEAT:
            raise UnknownOption(f"option 'beat' has no value {given['beat']!r}.{nearest(given['beat'], BEAT)}")
        if "cache_dir" in given:
            given["cache_dir"] = _folder(given["cache_dir"], "option 'cache_dir'")
        families = given.get("families")
        for name in families or ():
            if not isinstance(name, str) or (isinstance(families, Mapping) and not isinstance(families[name], bool)):
                raise UnknownOption(f"option 'families' is a list of names, or names with True or False; {name!r} is not as it should be.")
        if families is not None and not isinstance(families, Mapping):
            given["families"] = tuple(families)
        return cls(**given)

    def allows(self, family: str) -> bool:
        """Whether the family of that name may swap."""
        if self.families is None:
            return True
        if isinstance(self.families, Mapping):
            return self.families.get(family, True)
        return family in self.families


_KINDS: dict[str, tuple[type, ...]] = {
    "cache_dir": (str, os.PathLike),
    "families": (Mapping, list, tuple, set, frozenset),
    "optimizer": (str,),
    "budget_s": (int, float),
    "beat": (str,),
    "mode": (str,),
    "inductor": (Mapping,),
    "verify": (bool,),
    "strict": (bool,),
    "identity": (bool,),
}
