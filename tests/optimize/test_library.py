from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from helpers import card_problems, scale_problem

from jasperk_inductor import device as devices
from jasperk_inductor.cache import Cache
from jasperk_inductor.contract import Entry, bucket
from jasperk_inductor.errors import UnknownName
from jasperk_inductor.evaluate import Evaluator
from jasperk_inductor.families import families, kernels_dir
from jasperk_inductor.optimize import NotFound, improve, library, optimizer


@pytest.fixture(scope="module")
def site():
    return card_problems(batch=3)["ffn_down"]


def test_the_best_kernel_enters_the_cache_once(site, cache_dir: Path, evaluator: Evaluator) -> None:
    cache = Cache(cache_dir)
    before = evaluator.evaluations
    entry = improve(site.problem, site.sizes, cache=cache, evaluator=evaluator, budget_s=60.0)
    assert isinstance(entry, Entry)
    assert entry.verdict.passed
    assert entry.bucket == 4
    assert evaluator.evaluations > before
    again = improve(site.problem, site.sizes, cache=Cache(cache_dir), evaluator=evaluator, budget_s=60.0)
    assert again == entry
    assert evaluator.evaluations == before + 1
    assert (cache.materialise(entry) / "kernel.so").exists()


def test_a_search_that_finds_nothing_is_remembered(cache_dir: Path, evaluator: Evaluator) -> None:
    cache = Cache(cache_dir)
    result = improve(scale_problem(), {"r0": 2}, cache=cache, evaluator=evaluator, budget_s=30.0)
    assert isinstance(result, NotFound)
    assert "no kernel of family scale" in result.reason
    assert list((cache_dir / "attempts").iterdir())
    assert improve(scale_problem(), {"r0": 2}, cache=Cache(cache_dir), evaluator=evaluator, budget_s=30.0) == result


def test_a_search_cut_short_is_not_remembered(site, cache_dir: Path, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "candidates", lambda *_: [])
    monkeypatch.setattr(library, "tuned_candidates", lambda *_: [])
    monkeypatch.setattr(library, "_nothing", lambda *_: time.sleep(0.02) or "nothing yet")
    result = improve(site.problem, site.sizes, cache=Cache(cache_dir), evaluator=evaluator, budget_s=0.01)
    assert isinstance(result, NotFound)
    assert not list((cache_dir / "attempts").iterdir())


def test_tuned_entries_come_first_and_alone(
    site, cache_dir: Path, evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"TILE_M": 6, "TILE_N": 4}
    path = tmp_path / "tuned.json"
    row = {"problem": library.signature(site.problem.spec), "bucket": bucket(site.rows), "language": "cpp", "params": chosen}
    path.write_text(json.dumps([row]))
    monkeypatch.setattr(library, "_tuned_path", lambda family, device: path)
    monkeypatch.setattr(evaluator, "rank", lambda *a, **k: pytest.fail("nothing may be searched"))
    entry = improve(site.problem, site.sizes, cache=Cache(cache_dir), evaluator=evaluator, budget_s=60.0)
    assert isinstance(entry, Entry)
    assert dict(entry.candidate.params) == chosen
    assert entry.candidate.origin == "library:tuned"
    assert library.save_tuned([entry], "cpu") == [path]
    assert json.loads(path.read_text()) == [row]


def test_what_changes_the_library_changes_the_fingerprint(site, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library.fingerprint(site.problem, site.sizes, "cpu")
    assert before == library.fingerprint(site.problem, site.sizes, "cpu")
    monkeypatch.setenv("JASPERK_CXX", "/nonexistent")
    assert library.fingerprint(site.problem, site.sizes, "cpu") != before


def test_an_unknown_optimizer_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="'library'"):
        optimizer("libary")


@pytest.mark.parametrize("path", sorted(kernels_dir().glob("*/tuned/*.json")), ids=lambda p: f"{p.parent.parent.name}-{p.stem}")
def test_shipped_tuned_entries_are_in_the_search_space(path: Path) -> None:
    """So that an edit of a kernel's parameters cannot leave a tuned entry behind that no longer builds."""
    family, problems = families()[path.parent.parent.name], card_problems(dtype="bfloat16")
    for row in json.loads(path.read_text()):
        assert set(row) == {"problem", "bucket", "language", "params"}
        names = {frozenset(p) for p in family.space[row["language"]](problems[family.name].problem.spec, row["bucket"])}
        assert frozenset(row["params"]) in names


def test_validity_of_this_machine() -> None:
    here = devices.validity("cpu")
    assert here.mismatch(devices.validity("cpu")) is None
    assert here.units >= 1
    assert devices.peaks("cpu").limit_ms(1e9, 0) > 0
