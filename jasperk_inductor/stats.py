"""Medians, intervals and ratios of time samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """A speedup: median over median, with a 95% bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def faster(self) -> bool:
        """The interval lies above 1."""
        return self.low > 1.0

    @property
    def verdict(self) -> str:
        return "faster" if self.low > 1.0 else "slower" if self.high < 1.0 else "a tie"

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def median(samples: Sequence[float]) -> float:
    return float(np.median(samples)) if len(samples) else math.nan


def interval(samples: Sequence[float], resamples: int = 1000) -> tuple[float, float]:
    """95% bootstrap interval of the median. Deterministic: the same samples give the same interval."""
    medians = _bootstrap(samples, resamples, 0)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def ratio(baseline: Sequence[float], candidate: Sequence[float], resamples: int = 1000) -> Ratio:
    """How many times faster `candidate` is than `baseline` (both in the same unit of time).

    Samples taken in turn, as many on both sides, are resampled in pairs, so that a drift of the machine's speed cancels.
    """
    if not len(baseline) or not len(candidate):
        return Ratio(math.nan, math.nan, math.nan)
    if len(baseline) == len(candidate):
        index = np.random.default_rng(0).integers(0, len(baseline), (resamples, len(baseline)))
        quotients = np.median(np.asarray(baseline)[index], axis=1) / np.median(np.asarray(candidate)[index], axis=1)
    else:
        quotients = _bootstrap(baseline, resamples, 0) / _bootstrap(candidate, resamples, 1)
    low, high = np.quantile(quotients, [0.025, 0.975])
    return Ratio(median(baseline) / median(candidate), float(low), float(high))


def _bootstrap(samples: Sequence[float], resamples: int, seed: int) -> np.ndarray:
    values = np.asarray(samples, dtype=float)
    index = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    return np.median(values[index], axis=1)
