from __future__ import annotations

import math

from jasperk_inductor import stats


def test_ratio_and_verdict() -> None:
    fast, slow = [1.0, 1.01, 0.99] * 10, [2.0, 2.02, 1.98] * 10
    assert stats.ratio(slow, fast).verdict == "faster"
    assert stats.ratio(fast, slow).verdict == "slower"
    assert abs(stats.ratio(slow, fast).value - 2.0) < 1e-9


def test_a_ratio_of_the_same_samples_is_a_tie() -> None:
    noisy = [1.0, 1.2, 0.9, 1.1, 1.05] * 8
    assert stats.ratio(noisy, list(noisy)).verdict == "a tie"
    assert not stats.ratio(noisy, list(noisy)).faster


def test_pairs_cancel_a_drift() -> None:
    drift = [1.0 + 0.1 * i for i in range(30)]
    assert stats.ratio([d * 1.05 for d in drift], drift).faster


def test_the_interval_is_reproducible_and_holds_the_median() -> None:
    samples = [1.0, 2.0, 3.0, 4.0, 5.0, 100.0]
    low, high = stats.interval(samples)
    assert (low, high) == stats.interval(samples)
    assert low <= stats.median(samples) <= high


def test_nothing_measured_is_not_a_number() -> None:
    assert math.isnan(stats.ratio([], [1.0]).value)
    assert not stats.ratio([], [1.0]).faster
