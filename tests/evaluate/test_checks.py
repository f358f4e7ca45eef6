from __future__ import annotations

import math

import pytest
import torch
from helpers import scale_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from jasperk_inductor.contract import Status, Tolerance
from jasperk_inductor.evaluate import checks

SPEC = scale_problem().spec
STRICT = Tolerance()


def verdict(out: torch.Tensor, ref: torch.Tensor, exact: torch.Tensor | None = None, tolerance: Tolerance = STRICT) -> Status:
    return checks.judge_outputs(SPEC, tolerance, [out], [ref], None if exact is None else [exact])[0]


def test_equal_passes() -> None:
    x = torch.randn(4, 64)
    assert verdict(x, x, x.double()) is Status.PASSED


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_where_the_reference_is(bad: float) -> None:
    x = torch.randn(4, 64)
    y = x.clone()
    y[0, 0] = bad
    assert verdict(y, x) is Status.NOT_FINITE
    assert verdict(y, y) is Status.PASSED, "the same NaN or infinity in both is right"


def test_infinity_of_the_other_sign_is_wrong() -> None:
    x = torch.full((1, 64), math.inf)
    assert verdict(-x, x) is Status.NOT_FINITE


def test_one_percent_of_elements_may_be_off_but_not_the_global_error() -> None:
    x = torch.ones(100, 100)
    few = x.clone()
    few.view(-1)[:90] += 0.05
    loose = Tolerance(fp64_factor=None)
    assert verdict(few, x, tolerance=loose) is Status.PASSED
    many = x.clone()
    many.view(-1)[:200] += 0.05
    assert verdict(many, x, tolerance=loose) is Status.MISMATCH
    huge = x.clone()
    huge.view(-1)[:2] += 100.0  # two elements of ten thousand, but a relative L2 error above one percent
    assert verdict(huge, x, tolerance=loose) is Status.MISMATCH


def test_a_tenth_of_a_percent_everywhere_is_too_far_from_float64() -> None:
    x = torch.randn(64, 64)
    assert verdict(x * 1.001, x, x.double()) is Status.LESS_ACCURATE
    assert verdict(x * 1.001, x, x.double(), Tolerance(fp64_factor=None)) is Status.PASSED


def test_error_may_be_a_stated_factor_of_the_references_own() -> None:
    exact = torch.randn(256, 64, dtype=torch.float64)
    eager = (exact * (1 + 1e-5)).float()
    assert verdict((exact * (1 - 1.9e-5)).float(), eager, exact) is Status.PASSED
    assert verdict((exact * (1 - 2.2e-5)).float(), eager, exact) is Status.LESS_ACCURATE


def test_a_few_elements_may_be_lucky() -> None:
    """Over eight elements the reference's own error says little about what is right; over many it says it all."""
    exact = torch.randn(8, dtype=torch.float64)
    eager = (exact * (1 + 1e-5)).float()
    assert verdict((exact * (1 - 3e-5)).float(), eager, exact) is Status.PASSED
    assert verdict((exact * (1 - 6e-5)).float(), eager, exact) is Status.LESS_ACCURATE


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 40))
def test_chunks_do_not_change_the_sums(rows: int, columns: int, chunk: int) -> None:
    a, b = torch.randn(rows, columns), torch.randn(rows, columns)
    before = checks._CHUNK
    try:
        whole = checks.compare(a, b, STRICT)
        checks._CHUNK = chunk
        parts = checks.compare(a, b, STRICT)
    finally:
        checks._CHUNK = before
    assert isinstance(whole, checks.Compared)
    assert isinstance(parts, checks.Compared)
    assert whole.right == parts.right
    assert math.isclose(whole.l1, parts.l1, rel_tol=1e-9)
    assert math.isclose(whole.l2, parts.l2, rel_tol=1e-9)
    assert whole.max_abs == parts.max_abs
    assert math.isclose(whole.l2, float((a - b).double().norm() / b.double().norm()), rel_tol=1e-5)


def described(shape: list[int], dtype: str = "float32", stride: list[int] | None = None) -> dict:
    return {"shape": shape, "dtype": dtype, "stride": stride or list(torch.empty(shape).stride())}


@pytest.mark.parametrize(
    ("outputs", "status"),
    [
        ([described([4, 64])], None),
        ([], Status.WRONG_STRUCTURE),
        ([described([4, 64])] * 2, Status.WRONG_STRUCTURE),
        ([described([64, 4])], Status.WRONG_SHAPE),
        ([described([4, 64], "float64")], Status.WRONG_DTYPE),
        ([described([4, 64], stride=[1, 4])], Status.WRONG_STRIDES),
    ],
)
def test_structure(outputs: list[dict], status: Status | None) -> None:
    wrong = checks.structure(SPEC, {"r0": 4}, outputs, ["y"])
    assert (wrong[0] if wrong else None) is status


def test_strides_of_size_one_do_not_matter() -> None:
    assert checks.structure(SPEC, {"r0": 1}, [described([1, 64], stride=[999, 1])], ["y"]) is None


def test_near_the_exact_result_is_right_where_the_reference_cancels() -> None:
    """a + b rounds in bf16 before c takes most of it away again; a kernel that rounds once differs from that, and is right."""
    a, b = torch.randn(2, 4096, dtype=torch.bfloat16) * 64
    c = (-(a.float() + b.float()) + torch.randn(4096)).bfloat16()
    exact = a.double() + b.double() + c.double()
    eager = a + b + c
    once = (a.float() + b.float() + c.float()).bfloat16()
    loose = Tolerance(l1=1.0, l2=1.0)
    assert isinstance(found := checks.compare(once, eager, loose), checks.Compared)
    assert found.right < 0.9 * found.count
    assert verdict(once, eager, exact, loose) is Status.PASSED
    assert verdict(eager + 1, eager, exact, loose) is Status.MISMATCH
