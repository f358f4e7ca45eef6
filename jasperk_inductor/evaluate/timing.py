"""Clocks, as they run inside a worker.

"wall": synchronised wall time of one call, from Python. "graph": CUDA-graph replay, device time a call, with the L2 flushed
before each call and the flush's own time taken off. Inputs rotate through a ring of sets in memory of their own: every call of
a ring sees fresh pointers, fresh activations, and weights that are no longer in cache.

What is measured here is only reported; the judge bounds it with its own clock from outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

RING_BYTES = 4 << 30  # most memory for a ring


class Ring:
    """Sets of inputs, and the outputs of the last call on each."""

    def __init__(self, sets: list[tuple[torch.Tensor, ...]], cold_bytes: int, cuda: bool) -> None:
        self.sets = sets
        self.cuda = cuda
        self.outputs: list[Any] = [None] * len(sets)
        total = sum(t.nbytes for one in sets for t in one)
        self.flush = torch.empty(2 * cold_bytes, dtype=torch.uint8, device="cuda") if cuda and total < 2 * cold_bytes else None
        self._graph: Any = None
        self._flush_ms = 0.0

    def wall(self, kernel: Callable[..., Any], repeats: int) -> list[float]:
        """Milliseconds of each of `repeats` calls."""
        sets, outputs, clock = self.sets, self.outputs, time.perf_counter
        sync = torch.cuda.synchronize if self.cuda else _nothing
        samples = []
        for i in range(repeats):
            inputs = sets[i % len(sets)]
            if self.flush is not None:
                self.flush.zero_()
            sync()
            start = clock()
            out = kernel(*inputs)
            sync()
            samples.append((clock() - start) * 1e3)
            outputs[i % len(sets)] = out
        return samples

    def capture(self, kernel: Callable[..., Any]) -> float:
        """Captures one call on each set; returns the time of the flushes alone, in ms a call."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for inputs in self.sets[:2]:
                kernel(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for i, inputs in enumerate(self.sets):
                if self.flush is not None:
                    self.flush.zero_()
                self.outputs[i] = kernel(*inputs)
        self._flush_ms = 0.0
        if self.flush is not None:
            empty = torch.cuda.CUDAGraph()
            with torch.cuda.graph(empty):
                for _ in self.sets:
                    self.flush.zero_()
            self._replay(empty, 3)
            self._flush_ms = sorted(self._replay(empty, 11))[5]
        self._replay(self._graph, 3)
        return self._flush_ms

    def graph(self, repeats: int) -> list[float]:
        """Milliseconds a call, one sample a replay of the whole ring. Outputs are poisoned first: what is read back after
        was written by these replays."""
        for out in self.outputs:
            for tensor in out:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        return [max(0.0, ms - self._flush_ms) for ms in self._replay(self._graph, repeats)]

    def _replay(self, graph: Any, repeats: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / len(self.sets) for a, b in zip(events, events[1:], strict=False)]


def _nothing() -> None:
    return None


def ring_length(parameter_bytes: int, nbytes: int, cold_bytes: int, cuda: bool) -> int:
    """How many sets of inputs. Weights must have left the cache when their turn comes again, as in a model; activations are in
    cache there, so without weights a few sets, for fresh pointers, are enough."""
    enough = 2 * cold_bytes // max(1, parameter_bytes) + 1 if parameter_bytes > cold_bytes // 64 else 3
    if cuda and parameter_bytes < cold_bytes:
        enough = max(8, enough)  # short kernels: one graph must hold several, or the clock's own step shows
    return int(max(3, min(16 if cuda else 32, enough, RING_BYTES // max(1, nbytes))))
