"""What a kernel language must offer, so that the optimizer, the evaluator and the cache need not know any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contract import Candidate, Spec, Status

# A built kernel: input tensors in the order of the Spec -> output tensors, each new.
Kernel = Callable[..., tuple[Any, ...]]


class BuildFailed(Exception):
    """A candidate did not build. The message is the compiler's, shortened to what a person (or a model) can act on."""

    def __init__(self, message: str, status: Status = Status.BUILD_FAILED) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Language:
    """One kernel language.

    Attributes:
        name: as in Candidate.language.
        file: name of a family's shipped source in its folder.
        devices: device types it runs on.
        missing: device type -> what is missing on this machine to build or run it; None if nothing is.
        screen: source -> (status, message) if the text is not acceptable, without running any of it.
        build: (candidate, spec, folder, timeout in seconds): writes everything that `load` needs into `folder`, with
            relative paths only. Runs compilers, never the candidate.
        load: (folder, candidate, spec) -> Kernel. Runs the candidate's code in this process.
        warm: whether a first call after `load` still compiles (and fills `folder`), as Triton does.
    """

    name: str
    file: str
    devices: tuple[str, ...]
    missing: Callable[[str], str | None]
    screen: Callable[[str], tuple[Status, str] | None]
    build: Callable[[Candidate, Spec, Path, float], None]
    load: Callable[[Path, Candidate, Spec], Kernel]
    warm: bool = False
