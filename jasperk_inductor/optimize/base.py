"""What every optimizer returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..contract import Candidate, Verdict


@dataclass(frozen=True)
class Found:
    """A kernel that passed the full protocol, and the folder of its built files."""

    candidate: Candidate
    verdict: Verdict
    folder: Path


@dataclass(frozen=True)
class NotFound:
    """The search ended without one; `reason` is for people."""

    reason: str
