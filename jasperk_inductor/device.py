"""What the device is, and how fast it could be.

The identity goes into every cache key and validity record. The peaks turn a time into a share of the roofline: measured ones
for GPUs we know, a quick measurement of our own otherwise (kept beside the cache, since it takes a moment).
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import time
from dataclasses import dataclass

import torch

from .contract import Validity

EVALUATOR = "1"  # raise it when a change makes older verdicts incomparable

# (read bandwidth in bytes/s, dense bf16 FLOP/s), measured: a read of several GB, an 8192^3 product of random values.
_PEAKS = {"NVIDIA H200": (4.46e12, 787e12)}


@dataclass(frozen=True)
class Peaks:
    """The two ceilings. `flops` is for bf16 products; other types are not told apart."""

    bandwidth: float
    flops: float

    def limit_ms(self, nbytes: float, flops: float) -> float:
        """The roofline: no kernel is faster than the larger of the two times."""
        return max(nbytes / self.bandwidth, flops / self.flops) * 1e3


def device_type(device: str | torch.device) -> str:
    return torch.device(device).type


@functools.cache
def name(device: str) -> str:
    """The device's name for keys: the GPU's, or the processor's with its vector instructions."""
    if device_type(device) == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"


def units(device: str) -> int:
    """SMs of a GPU; threads that torch uses on a CPU, since a time holds for a number of threads."""
    if device_type(device) == "cuda":
        return torch.cuda.get_device_properties(torch.device(device)).multi_processor_count
    return torch.get_num_threads()


@functools.cache
def l2_bytes(device: str) -> int:
    """Last-level cache that a cold measurement must outgrow."""
    if device_type(device) == "cuda":
        return torch.cuda.get_device_properties(torch.device(device)).L2_cache_size
    return 32 << 20


@functools.cache
def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            return next((word for word in file.read().split() if word[:1].isdigit() and "." in word), "")
    except OSError:
        return ""


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def validity(device: str) -> Validity:
    """The record of where a verdict reached now holds."""
    cuda = device_type(device) == "cuda"
    return Validity(
        device=name(device),
        capability=".".join(map(str, torch.cuda.get_device_capability(torch.device(device)))) if cuda else platform.machine(),
        units=units(device),
        torch=torch.__version__.split("+")[0],
        triton=_version("triton") if cuda else "",
        cuda=(torch.version.cuda or "") if cuda else "",
        driver=_driver() if cuda else "",
        evaluator=EVALUATOR,
    )


@functools.cache
def peaks(device: str) -> Peaks:
    """The device's ceilings: known ones, or measured now (a fraction of a second)."""
    if (known := _PEAKS.get(name(device))) is not None:
        return Peaks(*known)
    cuda = device_type(device) == "cuda"
    data = torch.ones((1 << 28) if cuda else (1 << 24), device=device)
    n, dtype = (8192, torch.bfloat16) if cuda else (768, torch.float32)
    a = torch.randn(n, n, device=device).to(dtype)
    bandwidth = data.nbytes / _fastest(lambda: data.sum(), device)
    return Peaks(bandwidth, 2 * n**3 / _fastest(lambda: a @ a, device))


def _fastest(work, device: str, repeats: int = 7) -> float:  # type: ignore[no-untyped-def]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if device_type(device) == "cuda":
            torch.cuda.synchronize(torch.device(device))
        times.append(time.perf_counter() - start)
    return min(times)
