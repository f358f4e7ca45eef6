from __future__ import annotations

import dataclasses

import pytest
from helpers import scale_problem
from hypothesis import given
from hypothesis import strategies as st

from jasperk_inductor.contract import (
    Accuracy,
    Candidate,
    Entry,
    Latency,
    Problem,
    Profile,
    Spec,
    Status,
    TensorSpec,
    Tolerance,
    Validity,
    Verdict,
    bucket,
    from_json,
    to_json,
)  # fmt: skip

HERE = Validity("cpu x", "x86_64", 2, "2.13.0", "", "", "", "1")


def entry(problem: Problem | None = None, ms: float = 1.0) -> Entry:
    latency = Latency("wall", (ms, ms * 1.1), (2.0, 2.1), (1.5, 1.6))
    verdict = Verdict(Status.PASSED, "", Accuracy(1.0, 0.0, 0.0, 0.0), latency, Profile(), (("r0", 4),), 0.5)
    return Entry(problem or scale_problem(), 4, Candidate("cpp", "text", (("N", 4),)), verdict, HERE, (("kernel.so", "ab" * 32),))


@given(st.integers(1, 1 << 20))
def test_bucket_is_the_next_power_of_two(rows: int) -> None:
    b = bucket(rows)
    assert b >= rows
    assert b & (b - 1) == 0
    assert b == 1 or b // 2 < rows


dims = st.lists(st.one_of(st.integers(1, 9), st.sampled_from(["r0", "r1"])), min_size=1, max_size=4).map(tuple)
specs = st.builds(TensorSpec, st.sampled_from(["x", "w0"]), dims, st.sampled_from(["float32", "bfloat16"]))
params = st.lists(
    st.tuples(st.sampled_from(["eps", "flag", "name"]), st.one_of(st.floats(0.5, 2), st.booleans(), st.text(max_size=3))), max_size=3
).map(tuple)


@given(st.builds(Problem, st.just("f"), st.text(), st.lists(specs, max_size=3).map(tuple), st.lists(specs, max_size=2).map(tuple), params))
def test_json_gives_back_the_same_problem(problem: Problem) -> None:
    back = from_json(Problem, to_json(problem))
    assert back == problem
    assert back.hash == problem.hash


def test_json_gives_back_the_same_entry() -> None:
    assert from_json(Entry, to_json(entry())) == entry()


@pytest.mark.parametrize("change", ["missing", "type", "status"])
def test_damaged_json_is_an_error(change: str) -> None:
    data = to_json(entry())
    if change == "missing":
        del data["candidate"]
    elif change == "type":
        data["bucket"] = "many"
    else:
        data["verdict"]["status"] = "fine"
    with pytest.raises(ValueError, match="validation error"):
        from_json(Entry, data)


def test_what_a_hash_depends_on() -> None:
    one = scale_problem()
    assert one.hash == scale_problem().hash
    for other in (scale_problem(width=65), scale_problem(layout="strided"), scale_problem(tolerance=Tolerance(atol=1.0))):
        assert other.hash != one.hash
    kernel = Candidate("cpp", "text", (("N", 4),))
    assert kernel.hash == dataclasses.replace(kernel, origin="llm 1.2").hash
    assert kernel.hash != dataclasses.replace(kernel, params=(("N", 8),)).hash


def test_a_candidate_learns_nothing_but_the_spec() -> None:
    assert [f.name for f in dataclasses.fields(Spec)] == ["family", "inputs", "outputs", "params", "mutated"]
    assert "reference" not in to_json(scale_problem().spec)


def test_validity_names_the_first_difference_and_ignores_the_driver() -> None:
    assert HERE.mismatch(dataclasses.replace(HERE, driver="999")) is None
    assert HERE.mismatch(dataclasses.replace(HERE, torch="2.14.0")) == "torch: built for '2.13.0', here '2.14.0'"


def test_bytes_and_rows() -> None:
    problem = scale_problem(width=10)
    assert problem.symbols == ("r0",)
    assert problem.rows({"r0": 3}) == 3
    assert problem.nbytes({"r0": 3}) == 2 * 3 * 10 * 4
