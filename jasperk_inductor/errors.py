"""What can go wrong through a caller's mistake or ours.

A candidate kernel that fails is not an error: it is a `Verdict` with a status. A site that cannot be swapped is not an error
either: it is `Kept` with a reason. What is left raises one of these, and each message says what to do next.

    JasperkError
    ├── UnknownOption        torch.compile(..., options={...}) holds a key or value we do not know
    ├── UnknownName          no such model, family, optimizer or language (with the nearest known name)
    ├── MissingTool          g++, nvcc, triton or an extra is needed and not there
    ├── BadProblem           a problem or candidate file does not say what it must
    ├── CacheUnavailable     the cache directory cannot be created or written
    ├── BadBundle            a packed cache file is truncated, tampered with, or not one of ours
    ├── WorkerLost           an evaluation process could not be started or restarted
    └── SwapFailed           rewriting a graph failed (only raised under strict=True)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class JasperkError(Exception):
    """The base of every error that jasperk raises on purpose."""


class UnknownOption(JasperkError, ValueError):
    """An option of `torch.compile(..., options={...})` that does not exist or has a value of the wrong kind."""


class UnknownName(JasperkError, LookupError):
    """A model, family, optimizer, language or suite of that name does not exist."""


class MissingTool(JasperkError, RuntimeError):
    """A compiler or optional dependency is missing on this machine."""


class BadProblem(JasperkError, ValueError):
    """A problem or candidate is malformed."""


class CacheUnavailable(JasperkError, OSError):
    """The cache directory cannot be used."""


class BadBundle(JasperkError, ValueError):
    """A packed cache is damaged or foreign."""


class WorkerLost(JasperkError, RuntimeError):
    """An evaluation process could not be started."""


class SwapFailed(JasperkError, RuntimeError):
    """Our part of a compile failed; raised only under strict=True, otherwise the pristine graph runs."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A closing sentence for "unknown X" messages: the nearest known name, and all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(names) or 'none'}."
