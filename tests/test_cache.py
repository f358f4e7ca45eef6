"""A cache that is damaged, shared, moved, killed or read-only stays a cache."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import shutil
import signal
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
from helpers import scale_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import HERE, entry

from jasperk_inductor import bundle
from jasperk_inductor.cache import Cache, Damaged
from jasperk_inductor.contract import Attempt, Entry, Status
from jasperk_inductor.errors import BadBundle, CacheUnavailable

PROBLEM = scale_problem()


def stored(root: Path, ms: float = 1.0, content: bytes = b"code") -> tuple[Cache, Entry]:
    folder = Path(tempfile.mkdtemp(prefix="jasperk-test-"))
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    (folder / "kernel.so").write_bytes(content)
    (folder / "sub" / "more").write_bytes(b"more")
    cache = Cache(root)
    try:
        return cache, cache.put(entry(PROBLEM, ms), folder)
    finally:
        shutil.rmtree(folder)


def test_what_was_put_comes_back(cache_dir: Path) -> None:
    cache, put = stored(cache_dir)
    for rows in (3, 4):
        got = Cache(cache_dir).get(PROBLEM, rows, HERE)
        assert got == put
    folder = cache.materialise(put)
    assert (folder / "kernel.so").read_bytes() == b"code"
    assert (folder / "sub" / "more").read_bytes() == b"more"
    assert cache.get(PROBLEM, 5, HERE) is None
    assert cache.get(scale_problem(width=65), 4, HERE) is None


def test_only_passed_enters_and_only_faster_replaces(cache_dir: Path) -> None:
    cache, first = stored(cache_dir, 1.0)
    failed = dataclasses.replace(first, verdict=dataclasses.replace(first.verdict, status=Status.MISMATCH))
    with pytest.raises(ValueError, match="passed"):
        cache.put(failed, cache_dir)
    assert stored(cache_dir, 2.0)[1] == first
    faster = stored(cache_dir, 0.5, b"faster")[1]
    assert cache.get(PROBLEM, 4, HERE) == faster


def test_another_device_or_version_is_a_miss_with_a_name(cache_dir: Path) -> None:
    cache, _ = stored(cache_dir)
    newer = dataclasses.replace(HERE, torch="9.9")
    assert cache.get(PROBLEM, 4, newer) is None
    assert cache.why_not(PROBLEM, 4, newer) == "torch: built for '2.13.0', here '9.9'"
    assert cache.get(PROBLEM, 4, dataclasses.replace(HERE, device="cpu y")) is None
    assert "cpu x" in str(cache.why_not(PROBLEM, 4, dataclasses.replace(HERE, device="cpu y")))
    assert "up to 4" in str(cache.why_not(PROBLEM, 100, HERE))
    assert cache.get(PROBLEM, 4, dataclasses.replace(HERE, driver="1.2.3")) is not None


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_damaged_entry_is_a_miss_and_set_aside(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("c") / "cache"
    stored(root)
    (path,) = (root / "entries").glob("*.json")
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:at])
    else:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :])
    got = Cache(root).get(PROBLEM, 4, HERE)
    assert got is None or got == entry(PROBLEM) or got.problem == PROBLEM
    if got is None:
        assert list((root / "quarantine").iterdir())
        assert not path.exists()


@pytest.mark.parametrize("how", ["changed", "missing"])
def test_a_damaged_blob_is_never_loaded(cache_dir: Path, how: str) -> None:
    _, put = stored(cache_dir)
    sha = dict(put.artifact)["kernel.so"]
    blob = cache_dir / "blobs" / sha[:2] / sha
    blob.write_bytes(b"evil") if how == "changed" else blob.unlink()
    fresh = Cache(cache_dir)
    got = fresh.get(PROBLEM, 4, HERE)
    assert got is not None
    with pytest.raises(Damaged):
        fresh.materialise(got)
    assert fresh.get(PROBLEM, 4, HERE) is None
    # and the next put heals it
    stored(cache_dir)
    again = Cache(cache_dir)
    assert (again.materialise(again.get(PROBLEM, 4, HERE)) / "kernel.so").read_bytes() == b"code"  # type: ignore[arg-type]


def test_an_artifact_cannot_leave_its_folder(cache_dir: Path) -> None:
    cache, put = stored(cache_dir)
    sha = dict(put.artifact)["kernel.so"]
    evil = dataclasses.replace(put, artifact=(("../../escaped", sha),))
    with pytest.raises(Damaged):
        cache.materialise(evil)
    assert not list(cache_dir.parent.rglob("escaped"))


def test_a_moved_cache_works(cache_dir: Path, tmp_path: Path) -> None:
    stored(cache_dir)
    cache_dir.rename(tmp_path / "elsewhere")
    moved = Cache(tmp_path / "elsewhere")
    got = moved.get(PROBLEM, 4, HERE)
    assert got is not None
    assert (moved.materialise(got) / "kernel.so").read_bytes() == b"code"
    assert str(cache_dir) not in "".join(p.read_text() for p in (tmp_path / "elsewhere" / "entries").iterdir())


def test_a_read_only_cache_keeps_new_kernels_for_the_process(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    cache, put = stored(blocked / "cache")
    assert cache.read_only is not None
    assert cache.get(PROBLEM, 4, HERE) == put
    assert (cache.materialise(put) / "kernel.so").read_bytes() == b"code"
    assert cache.buckets(PROBLEM, HERE) == [4]
    with pytest.raises(CacheUnavailable, match="cache-dir"):
        bundle.unpack(cache, tmp_path / "x", HERE)


def test_attempts_are_remembered_until_the_library_changes(cache_dir: Path) -> None:
    cache = Cache(cache_dir)
    cache.put_attempt(Attempt(PROBLEM.hash, 4, HERE, "v1", "all failed"), PROBLEM)
    found = Cache(cache_dir).attempt(PROBLEM, 4, HERE, "v1")
    assert found is not None
    assert found.reason == "all failed"
    assert cache.attempt(PROBLEM, 4, HERE, "v2") is None
    assert cache.attempt(PROBLEM, 5, HERE, "v1") is None
    stored(cache_dir)
    assert Cache(cache_dir).attempt(PROBLEM, 4, HERE, "v1") is None


def test_wanted_problems_are_listed_until_settled(cache_dir: Path) -> None:
    cache = Cache(cache_dir)
    cache.want(PROBLEM, {"r0": 4}, "cpu")
    cache.want(PROBLEM, {"r0": 3}, "cpu")  # the same bucket
    (wanted,) = Cache(cache_dir).wanted()
    assert wanted.problem == PROBLEM
    cache.settle(PROBLEM, {"r0": 4})
    assert Cache(cache_dir).wanted() == []


def _hold(root: Path, seconds: float, ready) -> None:
    with Cache(root).building(PROBLEM, 4, 5.0) as mine:
        assert mine
        ready.set()
        time.sleep(seconds)


def test_one_builder_per_key_across_processes(cache_dir: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = context.Process(target=_hold, args=(cache_dir, 60.0, ready))
    other.start()
    assert ready.wait(60)
    with Cache(cache_dir).building(PROBLEM, 4, 0.3) as mine:
        assert not mine
    with Cache(cache_dir).building(PROBLEM, 400, 0.3) as mine:
        assert mine, "another key is not locked"
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)  # a killed builder holds no lock
    other.join()
    with Cache(cache_dir).building(PROBLEM, 4, 5.0) as mine:
        assert mine


def _write_for_ever(root: Path, ready) -> None:
    number = 0
    while True:
        number += 1
        stored(root, 1.0 / number, os.urandom(1 << 16))
        ready.set()


def test_a_killed_writer_leaves_whole_entries_only(cache_dir: Path) -> None:
    context = multiprocessing.get_context("spawn")
    for _ in range(3):
        ready = context.Event()
        writer = context.Process(target=_write_for_ever, args=(cache_dir, ready))
        writer.start()
        assert ready.wait(60)
        time.sleep(0.15)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        cache = Cache(cache_dir)
        got = cache.get(PROBLEM, 4, HERE)
        assert got is not None
        cache.materialise(got)
    assert not (cache_dir / "quarantine").exists()


def test_concurrent_writers_and_readers(cache_dir: Path) -> None:
    context = multiprocessing.get_context("spawn")
    events = [context.Event() for _ in range(2)]
    writers = [context.Process(target=_write_for_ever, args=(cache_dir, e)) for e in events]
    for writer in writers:
        writer.start()
    assert all(e.wait(60) for e in events)
    end = time.monotonic() + 1.5
    reads = 0
    while time.monotonic() < end:
        cache = Cache(cache_dir)
        got = cache.get(PROBLEM, 4, HERE)
        if got is not None:
            cache.materialise(got)
            reads += 1
    for writer in writers:
        writer.kill()
        writer.join()
    assert reads > 5
    assert not (cache_dir / "quarantine").exists()


# ---------------------------------------------------------------------------------------------------------------- bundles


def test_a_bundle_travels(cache_dir: Path, tmp_path: Path) -> None:
    cache, put = stored(cache_dir)
    assert bundle.pack(cache, tmp_path / "k.tgz") == 1
    other = Cache(tmp_path / "other")
    (result,) = bundle.unpack(other, tmp_path / "k.tgz", HERE)
    assert (result.family, result.bucket, result.usable, result.reason) == ("scale", 4, True, "")
    assert other.get(PROBLEM, 4, HERE) == put
    assert (other.materialise(put) / "kernel.so").read_bytes() == b"code"


def test_a_bundle_for_another_device_is_kept_and_named(cache_dir: Path, tmp_path: Path) -> None:
    cache, _ = stored(cache_dir)
    bundle.pack(cache, tmp_path / "k.tgz")
    (result,) = bundle.unpack(Cache(tmp_path / "other"), tmp_path / "k.tgz", dataclasses.replace(HERE, units=8))
    assert not result.usable
    assert result.reason == "units: built for 2, here 8"


def test_only_some_families_are_packed(cache_dir: Path, tmp_path: Path) -> None:
    cache, _ = stored(cache_dir)
    assert bundle.pack(cache, tmp_path / "none.tgz", {"other"}) == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_damaged_bundle_adds_nothing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    base = tmp_path_factory.mktemp("b")
    cache, put = stored(base / "cache")
    bundle.pack(cache, base / "k.tgz")
    whole = (base / "k.tgz").read_bytes()
    cut = data.draw(st.booleans())
    at = data.draw(st.integers(0, len(whole) - 2))
    damaged = whole[:at] if cut else whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    (base / "k.tgz").write_bytes(damaged)
    other = Cache(base / "other")
    try:
        bundle.unpack(other, base / "k.tgz", HERE)
    except BadBundle:
        assert list(other.entries()) == []
    else:
        assert list(other.entries()) == [put]  # a byte that does not matter, e.g. gzip's time stamp


def _tar(path: Path, files: dict[str, bytes], link: str | None = None) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "entries/../../evil", "blobs/ab/../../evil", "notes.txt", "locks/x"])
def test_a_bundle_cannot_write_elsewhere(tmp_path: Path, name: str) -> None:
    head = {"bundle.json": json.dumps({"format": 1}).encode()}
    _tar(tmp_path / "k.tgz", {**head, name: b"x"})
    with pytest.raises(BadBundle, match="not unpacked"):
        bundle.unpack(Cache(tmp_path / "c"), tmp_path / "k.tgz", HERE)
    _tar(tmp_path / "k.tgz", head, link="blobs/ab/" + "0" * 64)
    with pytest.raises(BadBundle, match="not unpacked"):
        bundle.unpack(Cache(tmp_path / "c"), tmp_path / "k.tgz", HERE)


@pytest.mark.parametrize("files", [{}, {"bundle.json": b"{}"}, {"bundle.json": b'{"format": 99}'}, {"bundle.json": b"nonsense"}])
def test_something_else_is_no_bundle(tmp_path: Path, files: dict[str, bytes]) -> None:
    _tar(tmp_path / "k.tgz", files)
    with pytest.raises(BadBundle):
        bundle.unpack(Cache(tmp_path / "c"), tmp_path / "k.tgz", HERE)


def test_a_bundle_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadBundle, match="no file"):
        bundle.unpack(Cache(tmp_path / "c"), tmp_path / "nothing.tgz", HERE)


def test_packing_where_nobody_may_write(cache_dir: Path) -> None:
    cache, _ = stored(cache_dir)
    with pytest.raises(CacheUnavailable, match="can write"):
        bundle.pack(cache, "/proc/k.tgz")


def test_two_versions_of_torch_share_a_cache_and_evict_nothing(cache_dir: Path) -> None:
    cache, mine = stored(cache_dir)
    other = dataclasses.replace(HERE, torch="9.9")
    folder = cache.materialise(mine)
    cache.put(dataclasses.replace(mine, validity=other), folder)
    assert Cache(cache_dir).get(PROBLEM, 4, HERE) == mine
    theirs = Cache(cache_dir).get(PROBLEM, 4, other)
    assert theirs is not None
    assert theirs.validity == other


def test_unpacking_never_takes_the_place_of_a_faster_kernel(cache_dir: Path, tmp_path: Path) -> None:
    slow, _ = stored(tmp_path / "slow", 5.0, b"slow")
    bundle.pack(slow, tmp_path / "slow.tgz")
    cache, fast = stored(cache_dir, 1.0)
    bundle.unpack(cache, tmp_path / "slow.tgz", HERE)
    assert Cache(cache_dir).get(PROBLEM, 4, HERE) == fast
    faster, quick = stored(tmp_path / "faster", 0.1, b"quick")
    bundle.pack(faster, tmp_path / "faster.tgz")
    bundle.unpack(cache, tmp_path / "faster.tgz", HERE)
    assert Cache(cache_dir).get(PROBLEM, 4, HERE) == quick


def test_a_failed_pack_leaves_nothing_behind(cache_dir: Path, tmp_path: Path) -> None:
    cache, _ = stored(cache_dir)
    target = tmp_path / "out"
    (target / "in the way").mkdir(parents=True)
    with pytest.raises(CacheUnavailable):
        bundle.pack(cache, target)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp")] == []
