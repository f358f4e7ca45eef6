"""The kernel cache: verified kernels by what they compute and where they hold.

    entries/<family>-<problem>-<device>-m<bucket>.json   an Entry with the SHA-256 of its text
    attempts/<same name>.json                            a search that found no kernel, so that nobody repeats it
    blobs/<aa>/<sha256>                                  files of built kernels, by content
    quarantine/                                          what turned out damaged, moved aside
    wanted/                                              problems that a compile met without finding a kernel
    locks/                                               one builder per key

Everything is written to a temporary file and renamed, so a killed process leaves a whole entry or none. Everything is hashed
again on load; what does not match is quarantined, which makes it a miss and is said once. Paths inside are relative and blobs
are addressed by content: a cache may be moved, copied and packed.

**Cached code runs in the user's process.** A hash protects against damage, not against somebody who can write to the folder: keep
the cache where only you can write, and unpack bundles only from people whose code you would run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import stats
from .contract import Attempt, Entry, Problem, Sizes, Validity, bucket, digest, from_json, to_json

log = logging.getLogger("jasperk")

FORMAT = 1


class Damaged(Exception):
    """A file that is not what its hash says."""


@dataclass(frozen=True)
class Wanted:
    """A problem that a compile met without finding a kernel, at these sizes, on this kind of device."""

    problem: Problem
    sizes: tuple[tuple[str, int], ...]
    device: str


class Cache:
    """A cache directory. Safe for several threads and processes at once.

    If the directory cannot be written, what is put there is kept for this process only, and `read_only` says why.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.read_only: str | None = None
        self._memory: dict[str, tuple[Entry, Path]] = {}
        self._tried: dict[str, Attempt] = {}
        self._materialised: dict[str, Path] = {}
        self._private: tempfile.TemporaryDirectory | None = None
        try:
            for name in ("entries", "attempts", "blobs", "locks"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            self.read_only = f"the cache directory {self.root} cannot be written ({error.strerror or error})"
            log.warning("%s; kernels found now are kept for this process only. Set JASPERK_CACHE_DIR or cache_dir.", self.read_only)

    # ------------------------------------------------------------------------------------------------------- read

    def get(self, problem: Problem, rows: int, here: Validity) -> Entry | None:
        """The entry that serves this problem at this number of rows here, or None."""
        name = _name(problem.family, problem.hash, here, bucket(rows))
        if name in self._memory:
            return self._memory[name][0]
        entry = self.read(self.root / "entries" / f"{name}.json", Entry)
        if entry is None or entry.problem.hash != problem.hash or entry.bucket != bucket(rows) or entry.validity.mismatch(here):
            return None
        return entry

    def why_not(self, problem: Problem, rows: int, here: Validity) -> str | None:
        """If there is an entry for this problem that does not hold here: the first factor in which it differs."""
        for path in sorted((self.root / "entries").glob(f"{problem.family}-{problem.hash[:20]}-*.json")):
            entry = self.read(path, Entry)
            if entry is None:
                continue
            if (reason := entry.validity.mismatch(here)) is not None:
                return reason
            if entry.bucket != bucket(rows):
                return f"rows: built for up to {entry.bucket}, here {rows}"
        return None

    def buckets(self, problem: Problem, here: Validity) -> list[int]:
        """Buckets of rows for which an entry serves this problem here."""
        names = [p.stem for p in (self.root / "entries").glob(_name(problem.family, problem.hash, here, "*") + ".json")]
        names += [n for n in self._memory if n.rsplit("-m", 1)[0] == _name(problem.family, problem.hash, here, "").rsplit("-m", 1)[0]]
        return sorted({b for n in names if self.get(problem, b := int(n.rsplit("-m", 1)[1]), here) is not None})

    def attempt(self, problem: Problem, rows: int, here: Validity, fingerprint: str) -> Attempt | None:
        """A past search, by the same optimizer over the same sources, that found nothing here."""
        name = _name(problem.family, problem.hash, here, bucket(rows))
        attempt = self._tried.get(name) or self.read(self.root / "attempts" / f"{name}.json", Attempt)
        if attempt is None or attempt.fingerprint != fingerprint or attempt.validity.mismatch(here):
            return None
        return attempt

    def entries(self) -> Iterator[Entry]:
        """All readable entries, of any device."""
        for path in sorted((self.root / "entries").glob("*.json")):
            if (entry := self.read(path, Entry)) is not None:
                yield entry

    def materialise(self, entry: Entry) -> Path:
        """The entry's files in a folder that is private to this process, each checked against its hash.

        Raises:
            Damaged: a file is missing or different; the entry has been quarantined.
        """
        name = _name(entry.problem.family, entry.problem.hash, entry.validity, entry.bucket)
        if name in self._memory:
            return self._memory[name][1]
        if entry.hash in self._materialised:
            return self._materialised[entry.hash]
        folder = self._private_folder() / entry.hash[:20]
        for relative, sha in entry.artifact:
            blob = self.root / "blobs" / sha[:2] / sha
            target = folder / relative
            try:
                data = blob.read_bytes()
            except OSError as error:
                self.quarantine(self.root / "entries" / f"{name}.json", f"its file {relative} is missing ({error.strerror})")
                raise Damaged(f"{relative} is missing") from error
            if hashlib.sha256(data).hexdigest() != sha or not _inside(folder, target):
                self.quarantine(blob, f"content of {relative} does not match its hash")
                self.quarantine(self.root / "entries" / f"{name}.json", f"its file {relative} is damaged")
                raise Damaged(f"{relative} is damaged")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        self._materialised[entry.hash] = folder
        return folder

    # ------------------------------------------------------------------------------------------------------ write

    def put(self, entry: Entry, folder: Path) -> Entry:
        """Keeps a verified kernel with the files in `folder`, unless a faster one is there. Returns the entry that now serves.

        Raises:
            ValueError: the verdict is not PASSED. Nothing else may enter.
        """
        if not entry.verdict.passed or entry.verdict.latency is None:
            raise ValueError(f"only a passed candidate may enter the cache, not one that is {entry.verdict.status}")
        known = self.get(entry.problem, entry.bucket, entry.validity)
        if known is not None and median_ms(known) <= median_ms(entry):
            return known
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        artifact = tuple((name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
        entry = Entry(entry.problem, entry.bucket, entry.candidate, entry.verdict, entry.validity, artifact)
        name = _name(entry.problem.family, entry.problem.hash, entry.validity, entry.bucket)
        try:
            if self.read_only:
                raise OSError(self.read_only)
            for (_, sha), data in zip(artifact, files.values(), strict=True):
                self.write(self.root / "blobs" / sha[:2] / sha, data)
            self.write(self.root / "entries" / f"{name}.json", sealed(to_json(entry)))
            with contextlib.suppress(FileNotFoundError):
                (self.root / "attempts" / f"{name}.json").unlink()
        except OSError as error:
            self._unwritable(error)
            private = self._private_folder() / name
            shutil.copytree(folder, private, dirs_exist_ok=True)
            self._memory[name] = (entry, private)
        return entry

    def put_attempt(self, attempt: Attempt, problem: Problem) -> None:
        """Remembers a search that found nothing."""
        name = _name(problem.family, problem.hash, attempt.validity, attempt.bucket)
        self._tried[name] = attempt
        try:
            if not self.read_only:
                self.write(self.root / "attempts" / f"{name}.json", sealed(to_json(attempt)))
        except OSError as error:
            self._unwritable(error)

    def want(self, problem: Problem, sizes: Sizes, device: str) -> None:
        """Notes a problem for which there is no kernel yet; `jasperk optimize --wanted` builds what is noted."""
        wanted = Wanted(problem, tuple(sizes.items()), device)
        name = f"{problem.family}-{problem.hash[:20]}-m{bucket(problem.rows(sizes))}.json"
        with contextlib.suppress(OSError):
            if not self.read_only:
                self.write(self.root / "wanted" / name, sealed(to_json(wanted)))

    def wanted(self) -> list[Wanted]:
        """All problems noted by `want`."""
        found = [self.read(path, Wanted) for path in sorted((self.root / "wanted").glob("*.json"))]
        return [w for w in found if w is not None]

    def settle(self, problem: Problem, sizes: Sizes) -> None:
        """A wanted problem has been dealt with."""
        with contextlib.suppress(OSError):
            (self.root / "wanted" / f"{problem.family}-{problem.hash[:20]}-m{bucket(problem.rows(sizes))}.json").unlink()

    @contextlib.contextmanager
    def building(self, problem: Problem, rows: int, timeout: float) -> Iterator[bool]:
        """One builder per key. Yields True to the builder; False if another still builds after `timeout` seconds. Whoever
        waited looks into the cache again: the other may have finished."""
        if self.read_only:
            yield True
            return
        path = self.root / "locks" / f"{problem.family}-{problem.hash[:20]}-m{bucket(rows)}"
        deadline = time.monotonic() + timeout
        try:
            lock = open(path, "w")  # noqa: SIM115  (held over the yield)
        except OSError as error:
            self._unwritable(error)
            yield True
            return
        with lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        yield False
                        return
                    time.sleep(0.1)
            yield True  # closing the file releases the lock, also when the process is killed

    # ---------------------------------------------------------------------------------------------------- private

    def read(self, path: Path, kind: Any) -> Any:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            return from_json(kind, opened(data))
        except (Damaged, ValueError) as error:
            self.quarantine(path, str(error).splitlines()[0])
            return None

    def quarantine(self, path: Path, reason: str) -> None:
        log.warning("cache: %s is set aside and counts as a miss: %s", path.name, reason)
        with contextlib.suppress(OSError):
            (self.root / "quarantine").mkdir(exist_ok=True)
            os.replace(path, self.root / "quarantine" / f"{time.strftime('%Y%m%d-%H%M%S')}-{path.name}")

    def write(self, path: Path, data: bytes) -> None:
        if path.exists() and path.parent.parent.name == "blobs" and sha_of(path) == path.name:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".tmp-", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise

    def _unwritable(self, error: OSError) -> None:
        if self.read_only is None:
            self.read_only = f"the cache directory {self.root} cannot be written ({error.strerror or error})"
            log.warning("%s; kernels found now are kept for this process only", self.read_only)

    def _private_folder(self) -> Path:
        if self._private is None:
            self._private = tempfile.TemporaryDirectory(prefix="jasperk-kernels-")
        return Path(self._private.name)


def _name(family: str, problem_hash: str, where: Validity, rows: int | str) -> str:
    return f"{family}-{problem_hash[:20]}-{digest(where.binding())[:8]}-m{rows}"


def median_ms(entry: Entry) -> float:
    """The kernel's own time in milliseconds."""
    assert entry.verdict.latency is not None
    return stats.median(entry.verdict.latency.candidate)


def sealed(data: Any) -> bytes:
    text = json.dumps(data, sort_keys=True)
    return json.dumps({"format": FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest(), "data": text}).encode()


def opened(data: bytes) -> str:
    try:
        outer = json.loads(data)
        text, sha = outer["data"], outer["sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged("it is cut off or no entry at all") from error
    if outer.get("format") != FORMAT:
        raise Damaged(f"its format is {outer.get('format')!r}, this version reads {FORMAT}")
    if not isinstance(text, str) or hashlib.sha256(text.encode()).hexdigest() != sha:
        raise Damaged("its content does not match its hash")
    return text


def sha_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _inside(folder: Path, target: Path) -> bool:
    return target.resolve().is_relative_to(folder.resolve())
