"""Kernel languages. To add one: a file with a `LANGUAGE`, and a line here."""

from __future__ import annotations

from ..errors import UnknownName, nearest
from . import cpp, cuda, torch, triton
from .base import BuildFailed, Kernel, Language

LANGUAGES: dict[str, Language] = {language.name: language for language in (cuda.LANGUAGE, triton.LANGUAGE, cpp.LANGUAGE, torch.LANGUAGE)}


def language(name: str) -> Language:
    """The language of that name.

    Raises:
        UnknownName: there is none; the message names the nearest.
    """
    try:
        return LANGUAGES[name]
    except KeyError:
        raise UnknownName(f"no kernel language {name!r}.{nearest(name, LANGUAGES)}") from None


__all__ = ["LANGUAGES", "BuildFailed", "Kernel", "Language", "language"]
