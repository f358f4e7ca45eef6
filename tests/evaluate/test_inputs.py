from __future__ import annotations

import random

import pytest
import torch
from helpers import card_problems, scale_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from jasperk_inductor.contract import TensorSpec, bucket
from jasperk_inductor.evaluate import inputs


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(["contiguous", "pitched", "strided", "scattered"]), st.booleans()
)
def test_layouts_hold_the_values_and_poison_the_gaps(shape: list[int], layout: str, wide: bool) -> None:
    name = f"pitched:{shape[-1] + 3}" if layout == "pitched" else layout
    spec = TensorSpec("x", tuple(shape), "float32", name, 16 if wide else 4)
    dense = torch.randn(shape)
    laid = inputs.lay_out(spec, dense)
    assert torch.equal(laid, dense)
    assert laid.untyped_storage().data_ptr() != dense.untyped_storage().data_ptr()
    if layout != "contiguous":
        base = torch.empty(0).set_(laid.untyped_storage())  # type: ignore[call-overload]
        if base.numel() > dense.numel():
            assert base.isnan().sum() == base.numel() - dense.numel()
    if layout in ("pitched", "strided"):
        assert laid.stride(-1) == 1 or shape[-1] == 1
    if layout == "pitched" and len(shape) > 1 and shape[-2] > 1:
        assert laid.stride(-2) == shape[-1] + 3


@pytest.mark.parametrize("style", inputs.STYLES)
def test_styles_differ_and_seeds_decide(style: str) -> None:
    problem = scale_problem()
    one, same, other = (inputs.draw(problem, {"r0": 50}, style, seed, "cpu")["x"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.isfinite().all()


def test_what_styles_are_for() -> None:
    problem = scale_problem()
    drawn = {style: inputs.draw(problem, {"r0": 500}, style, 3, "cpu")["x"] for style in inputs.STYLES}
    assert drawn["uniform"].min() >= 0
    assert abs(float(drawn["zero_mean"].mean())) < 1e-5
    assert float(drawn["scaled"].std()) > 6
    assert float(drawn["outliers"].abs().max()) > 20
    assert float(drawn["normal"].abs().max()) < 8


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(0, 99))
def test_trials_cover_the_bucket_and_stay_in_it(rows: int, seed: int) -> None:
    problem = scale_problem()
    sizes = inputs.trial_sizes(problem, {"r0": rows}, random.Random(seed), 5)
    tried = [problem.rows(s) for s in sizes]
    assert tried[0] == rows
    assert tried[1] == bucket(rows)
    assert tried[2] == bucket(rows) // 2 + 1
    assert all(bucket(t) == bucket(rows) for t in tried)


def test_trials_with_two_symbolic_sizes_keep_the_smaller_one() -> None:
    problem = card_problems()["qk_norm_rope"].problem
    for sizes in inputs.trial_sizes(problem, {"r0": 3, "r1": 20}, random.Random(0), 5):
        assert sizes["r0"] == 3
        assert sizes["r1"] >= 1


def test_drawing_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    inputs.draw(scale_problem(), {"r0": 4}, "normal", 5, "cpu")
    assert torch.equal(torch.randn(3), expected)
