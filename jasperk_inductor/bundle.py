"""Moving verified kernels between machines: `pack` writes a cache to one file, `unpack` adds such a file to a cache.

A bundle is a tar file of entries and the blobs they need, under the names they have in a cache. Nothing in it is trusted before it
has been read whole and hashed: unknown names, links, truncation and damage are refused, and then nothing is added.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from .cache import FORMAT, Cache, Damaged, median_ms, opened, sha_of
from .contract import Entry, Validity, from_json
from .errors import BadBundle, CacheUnavailable

_NAME = re.compile(r"entries/[a-z0-9_]+-[0-9a-f]{20}-[0-9a-f]{8}-m\d+\.json|blobs/[0-9a-f]{2}/[0-9a-f]{64}|bundle\.json")
_LARGEST = 1 << 30  # bytes of one file in a bundle


@dataclass(frozen=True)
class Unpacked:
    """What became of one entry of a bundle."""

    name: str
    family: str
    bucket: int
    usable: bool
    reason: str  # why not, on this device


def pack(cache: Cache, path: Path | str, only: set[str] | None = None) -> int:
    """Writes all entries (of these families) with their files to one file. Returns how many.

    Raises:
        CacheUnavailable: the file cannot be written.
    """
    path = Path(path)
    sources: dict[str, Path] = {}
    temporary: Path | None = None
    count = 0
    for source in sorted((cache.root / "entries").glob("*.json")):
        entry = cache.read(source, Entry)
        if entry is None or (only is not None and entry.problem.family not in only):
            continue
        blobs = {sha: cache.root / "blobs" / sha[:2] / sha for _, sha in entry.artifact}
        if not all(sha_of(b) == sha for sha, b in blobs.items()):
            cache.quarantine(source, "one of its files is damaged")
            continue
        sources |= {f"blobs/{sha[:2]}/{sha}": blob for sha, blob in blobs.items()}
        sources[f"entries/{source.name}"] = source
        count += 1
    try:
        files = {name: source.read_bytes() for name, source in sources.items()}
        head = {"format": FORMAT, "made": time.strftime("%Y-%m-%d"), "files": {n: _sha(d) for n, d in files.items()}}
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".tmp-{path.name}", delete=False) as file:
            temporary = Path(file.name)
            temporary.chmod(0o644)
            with tarfile.open(fileobj=file, mode="w:gz") as tar:
                for name, data in {"bundle.json": json.dumps(head).encode(), **files}.items():
                    info = tarfile.TarInfo(name)
                    info.size, info.mode = len(data), 0o644
                    tar.addfile(info, io.BytesIO(data))
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise CacheUnavailable(f"{path} cannot be written ({error.strerror}); name a file in a folder you can write to.") from error
    return count


def unpack(cache: Cache, path: Path | str, here: Validity) -> list[Unpacked]:
    """Adds a packed cache to this one. All or nothing is read before anything is written.

    Returns:
        One line per entry; an entry that does not hold here is kept (for the device it was made for) and named.

    Raises:
        BadBundle: not a bundle, truncated, or a file in it is damaged; nothing has been added.
        CacheUnavailable: this cache cannot be written.
    """
    if cache.read_only:
        raise CacheUnavailable(f"{cache.read_only}; choose another one with --cache-dir.")
    files = _read_bundle(Path(path))
    results, sealed = [], {}
    for name, data in files.items():
        if not name.startswith("entries/"):
            continue
        try:
            entry = from_json(Entry, opened(data))
        except (Damaged, ValueError) as error:
            raise BadBundle(f"{path}: {name} is damaged ({error}); pack it again.") from error
        if missing := [relative for relative, sha in entry.artifact if f"blobs/{sha[:2]}/{sha}" not in files]:
            raise BadBundle(f"{path}: {name} lacks its files {', '.join(missing)}; pack it again.")
        sealed[name] = data
        mismatch = entry.validity.mismatch(here)
        results.append(Unpacked(Path(name).stem, entry.problem.family, entry.bucket, mismatch is None, mismatch or ""))
    for name, data in files.items():
        if name.startswith("blobs/"):
            cache.write(cache.root / name, data)
    for name, data in sealed.items():
        entry = from_json(Entry, opened(data))
        there = cache.get(entry.problem, entry.bucket, entry.validity)
        if there is None or median_ms(entry) < median_ms(there):  # as everywhere: the faster one stays
            cache.write(cache.root / name, data)
    return results


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_bundle(path: Path) -> dict[str, bytes]:
    """The checked content of a bundle: known names only, regular files only, blobs that match their names."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as tar:
            for member in tar:
                if not member.isreg() or not _NAME.fullmatch(member.name) or member.size > _LARGEST:
                    raise BadBundle(f"{path} holds {member.name!r}, which no bundle of ours has; it is not unpacked.")
                content = tar.extractfile(member)
                assert content is not None
                files[member.name] = content.read()
    except FileNotFoundError:
        raise BadBundle(f"there is no file {path}.") from None
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise BadBundle(f"{path} is truncated or no bundle ({error}); nothing was added.") from error
    if "bundle.json" not in files:
        raise BadBundle(f"{path} is no bundle: it has no bundle.json.")
    try:
        head = json.loads(files.pop("bundle.json"))
        known, listed = head["format"], dict(head["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadBundle(f"{path}: its bundle.json is damaged; nothing was added.") from error
    if known != FORMAT:
        raise BadBundle(f"{path} has format {known!r}; this version reads format {FORMAT}.")
    if different := [n for n in {*listed, *files} if n not in files or listed.get(n) != _sha(files[n])]:
        raise BadBundle(f"{path}: {different[0]} is missing, damaged or not listed; nothing was added.")
    if misnamed := [n for n, data in files.items() if n.startswith("blobs/") and Path(n).name != _sha(data)]:
        raise BadBundle(f"{path}: {misnamed[0]} does not match its hash; nothing was added.")
    return files
