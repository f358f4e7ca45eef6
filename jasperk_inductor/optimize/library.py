"""The embedded optimizer: the shipped kernels, and a search over their launch parameters. Needs no LLM.

Tuned entries of this device come first: if the repository ships one for exactly this problem, only that is evaluated. Otherwise
all languages that this machine can build are tried in turn, best guess first, by quick times until the deadline; the winner then
passes the full protocol like any other candidate (and the next, should it fail).
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path

from .. import device as devices
from ..contract import Candidate, Entry, Problem, Sizes, Spec, bucket, digest
from ..evaluate import Evaluator
from ..families import families, kernels_dir
from ..languages import LANGUAGES, bundle
from .base import Found, NotFound

log = logging.getLogger("jasperk")

CHANCES = 3  # of the best by quick time that may fail the full protocol


def optimize(problem: Problem, sizes: Sizes, evaluator: Evaluator, deadline: float, folder: Path) -> Found | NotFound:
    """Searches until `deadline` (time.monotonic()); the winner's built files are left in `folder`."""
    tuned = list(tuned_candidates(problem, sizes, evaluator.device))
    others = [c for c in candidates(problem, sizes, evaluator.device) if c.hash not in {t.hash for t in tuned}]
    if not tuned and not others:
        return NotFound(_nothing(problem, evaluator.device))
    notes = []
    for candidate in tuned[:1]:
        verdict = evaluator.evaluate(problem, candidate, sizes, folder / candidate.hash[:16])
        if verdict.passed:
            return Found(candidate, verdict, folder / candidate.hash[:16])
        notes.append(f"{candidate.describe()}: {verdict.status}: {verdict.message}")
    ranked = evaluator.rank(problem, others, sizes, deadline)
    for candidate, took, why in ranked:
        log.info("%s M=%d %s: %s", problem.family, problem.rows(sizes), candidate.describe(), why or f"{took:.4f} ms")
    notes += [f"{c.describe()}: {why}" for c, _, why in ranked if why]
    for candidate in [c for c, _, why in ranked if not why][:CHANCES]:
        verdict = evaluator.evaluate(problem, candidate, sizes, folder / candidate.hash[:16])
        if verdict.passed:
            return Found(candidate, verdict, folder / candidate.hash[:16])
        notes.append(f"{candidate.describe()}: {verdict.status}: {verdict.message}")
        if time.monotonic() > deadline:
            break
    return NotFound(
        f"{len(notes)} candidates failed; first: {notes[0].splitlines()[0][:300]}" if notes else "no candidate was tried in time"
    )


def fingerprint(problem: Problem, sizes: Sizes, device: str) -> str:
    """Changes when the library would try something else: new sources, parameters, or a compiler that was missing."""
    tried = [*tuned_candidates(problem, sizes, device), *candidates(problem, sizes, device)]
    return digest(["library", [c.hash for c in tried]])


def candidates(problem: Problem, sizes: Sizes, device: str) -> list[Candidate]:
    """The shipped kernels of the problem's family at all launch parameters worth trying here."""
    family = families().get(problem.family)
    found: list[Candidate] = []
    if family is None:
        return found
    for language in LANGUAGES.values():
        source = _source(problem.family, language.name, device)
        if source is None or language.name not in family.space:
            continue
        for params in family.space[language.name](problem.spec, problem.rows(sizes)):
            found.append(Candidate(language.name, source, tuple(params.items()), "library"))
    return found


def _source(family: str, language: str, device: str) -> str | None:
    chosen = LANGUAGES[language]
    path = kernels_dir() / family / chosen.file
    usable = devices.device_type(device) in chosen.devices and chosen.missing(devices.device_type(device)) is None
    return bundle.read(path) if usable and path.exists() else None


def _nothing(problem: Problem, device: str) -> str:
    """Why there is nothing to try: what is missing to build the kernels that the family ships, or that it ships none."""
    kind = devices.device_type(device)
    shipped = [lang for lang in LANGUAGES.values() if kind in lang.devices and (kernels_dir() / problem.family / lang.file).exists()]
    missing = [why for lang in shipped if (why := lang.missing(kind)) is not None]
    if missing and len(missing) == len(shipped):
        return "; or ".join(missing)
    return f"the library ships no kernel of family {problem.family} for {kind} at these types and sizes"


# ------------------------------------------------------------------------------------------------------------ tuned entries


def signature(spec: Spec) -> str:
    """Roles, fixed sizes and types in one line: what a tuned entry is for. "*" is a symbolic size."""
    inputs = " ".join(f"{t.role}[{','.join('*' if isinstance(d, str) else str(d) for d in t.dims)}]:{t.dtype}" for t in spec.inputs)
    return f"{inputs} -> {' '.join(t.role for t in spec.outputs)}"


def _tuned_path(family: str, device: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", devices.name(device).lower()).strip("-")
    return kernels_dir() / family / "tuned" / f"{slug}.json"


def tuned_candidates(problem: Problem, sizes: Sizes, device: str) -> Iterable[Candidate]:
    """What the repository ships for this very problem, bucket and device."""
    path = _tuned_path(problem.family, device)
    if not path.exists():
        return
    for row in json.loads(path.read_text()):
        if row["problem"] == signature(problem.spec) and row["bucket"] == bucket(problem.rows(sizes)):
            if (source := _source(problem.family, row["language"], device)) is not None:
                yield Candidate(row["language"], source, tuple(row["params"].items()), "library:tuned")


def save_tuned(entries: Iterable[Entry], device: str) -> list[Path]:
    """Writes the launch parameters of library kernels into `kernels/<family>/tuned/`. Returns the files."""
    rows: dict[Path, dict[tuple[str, int], dict]] = {}
    for entry in entries:
        if not entry.candidate.origin.startswith("library"):
            continue
        path = _tuned_path(entry.problem.family, device)
        if path not in rows:
            old = json.loads(path.read_text()) if path.exists() else []
            rows[path] = {(r["problem"], r["bucket"]): r for r in old}
        key = (signature(entry.problem.spec), entry.bucket)
        rows[path][key] = {
            "problem": key[0], "bucket": key[1], "language": entry.candidate.language, "params": dict(entry.candidate.params),
        }  # fmt: skip
    for path, table in rows.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text("[\n" + ",\n".join(json.dumps(r) for r in table.values()) + "\n]\n")
    return list(rows)
