"""What the device is: the record that a verdict is bound to, and the ceilings that a time is held against."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from jasperk_inductor import device as devices


def test_the_record_names_what_a_verdict_depends_on() -> None:
    here = devices.validity("cpu")
    assert here == devices.validity("cpu")
    assert here.torch == torch.__version__.split("+")[0]
    assert here.units == torch.get_num_threads()
    assert not here.cuda
    assert not here.triton


@pytest.mark.parametrize("factor", ["device", "capability", "units", "torch", "triton", "cuda", "evaluator"])
def test_every_factor_but_the_driver_binds(factor: str) -> None:
    here = devices.validity("cpu")
    other = dataclasses.replace(here, **{factor: 99 if factor == "units" else "other"})
    assert (reason := other.mismatch(here)) is not None
    assert reason.startswith(f"{factor}: built for ")
    assert dataclasses.replace(here, driver="other").mismatch(here) is None


def test_fewer_threads_are_another_device() -> None:
    before = torch.get_num_threads()
    one = devices.validity("cpu")
    try:
        torch.set_num_threads(before + 1)
        assert "units" in (one.mismatch(devices.validity("cpu")) or "")
    finally:
        torch.set_num_threads(before)


def test_ceilings_of_this_machine_are_measured() -> None:
    peaks = devices.peaks("cpu")
    assert 1e9 < peaks.bandwidth < 1e13
    assert 1e9 < peaks.flops < 1e14
    assert peaks.limit_ms(peaks.bandwidth, 0) == pytest.approx(1e3)
    assert peaks.limit_ms(0, 2 * peaks.flops) == pytest.approx(2e3)


def test_the_h200s_ceilings_are_the_measured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "name", lambda device: "NVIDIA H200")
    devices.peaks.cache_clear()
    try:
        assert devices.peaks("cpu") == devices.Peaks(4.46e12, 787e12)
    finally:
        devices.peaks.cache_clear()
