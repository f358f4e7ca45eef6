"""A worker: one process that runs a candidate, or the reference, at the judge's command.

It knows a Spec (never the reference, if it runs a candidate), gets inputs, and returns outputs and raw samples. It decides
nothing. The judge does not trust what it says about itself; see judge.py.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .. import reference
from ..contract import Candidate, Spec, TensorSpec, from_json
from ..languages import language
from ..languages.triton import cache_folder
from . import guards, timing, wire
from .inputs import lay_out

Function = Callable[..., tuple[torch.Tensor, ...]]


class Worker:
    """The commands. Each takes the message's fields and returns the reply's."""

    def __init__(self, device: str, threads: int, cold_bytes: int) -> None:
        self.device, self.threads, self.cold_bytes = device, threads, cold_bytes
        self.cuda = torch.device(device).type == "cuda"
        self.functions: dict[str, Function] = {}
        self.folders: dict[str, Path] = {}
        self.specs: tuple[TensorSpec, ...] = ()
        self.rings: dict[str, timing.Ring] = {}

    def load(self, name: str, spec: Any, kind: str, **rest: Any) -> dict[str, Any]:
        """Makes a function callable by `name`: a candidate from its built folder, or one form of the reference."""
        parsed = from_json(Spec, spec)
        self.specs = parsed.inputs
        if kind == "candidate":
            candidate = from_json(Candidate, rest["candidate"])
            self.folders[name] = Path(rest["folder"])
            self.functions[name] = language(candidate.language).load(self.folders[name], candidate, parsed)
        elif kind == "eager":
            self.functions[name] = reference.load(rest["source"])
        elif kind == "exact":
            self.functions[name] = lambda *inputs: reference.exact(rest["source"], inputs)
        elif kind == "inductor":
            self.functions[name] = _Compiled(reference.load(rest["source"]), rest.get("config") or {})
        return {}

    def unload(self, name: str) -> dict[str, Any]:
        self.functions.pop(name, None)
        self.rings.pop(name, None)
        return {}

    def run(self, name: str, inputs: str, outputs: str, check_state: bool = False) -> dict[str, Any]:
        """One call; the outputs go to a file. Says which inputs changed, which outputs alias, and what state changed."""
        dense = wire.read_tensors(Path(inputs), self.device)
        tensors = [lay_out(spec, dense[spec.role]) for spec in self.specs]
        before = guards.state() if check_state else {}
        results = self._call(name, tensors)
        self._sync()
        changed = guards.changed(before) if check_state else []
        guards.reset(self.threads)
        if not all(isinstance(t, torch.Tensor) for t in results):
            return {"structure": [type(t).__name__ for t in results]}
        ranges = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]
        described = [{"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "stride": list(t.stride())} for t in results]
        reply = {
            "outputs": described,
            "changed_inputs": [s.role for s, t in zip(self.specs, tensors, strict=True) if not _same(t, dense[s.role])],
            "aliased": [i for i, t in enumerate(results) if any(start <= t.data_ptr() < start + size for start, size in ranges if size)],
            "changed_state": changed,
        }
        wire.write_tensors(Path(outputs), {str(i): t for i, t in enumerate(results)})
        return reply

    def stage(self, names: list[str], inputs: str, variants: int, length: int, clock: str) -> dict[str, Any]:
        """Lays out a ring of inputs for each function, warms it up and, for the graph clock, captures it."""
        dense = wire.read_tensors(Path(inputs), self.device)

        def one(i: int) -> tuple[torch.Tensor, ...]:
            return tuple(lay_out(s, dense[f"{s.role}.{i % variants}" if s.kind == "activation" else s.role]) for s in self.specs)

        flush_ms = {}
        shared = [one(i) for i in range(length)]
        for name in names:
            ring = timing.Ring(shared, self.cold_bytes, self.cuda)
            for inputs_ in ring.sets[:3]:
                self._call(name, inputs_)
            self._sync()
            if clock == "graph":
                with cache_folder(self.folders.get(name, Path("."))):
                    flush_ms[name] = ring.capture(self.functions[name])
            self.rings[name] = ring
        return {"flush_ms": flush_ms}

    def time(self, name: str, repeats: int, clock: str) -> dict[str, Any]:
        ring = self.rings[name]
        if clock == "graph":
            samples = ring.graph(repeats)
        else:
            with cache_folder(self.folders.get(name, Path("."))):
                samples = ring.wall(self.functions[name], repeats)
        return {"samples_ms": samples}

    def fetch(self, name: str, calls: list[int], outputs: str) -> dict[str, Any]:
        """Outputs of the last timed call on each of these sets."""
        ring = self.rings[name]
        found = {f"{call}.{i}": t for call in calls for i, t in enumerate(ring.outputs[call]) if isinstance(t, torch.Tensor)}
        wire.write_tensors(Path(outputs), found)
        return {}

    def profile(self, name: str) -> dict[str, Any]:
        """Which kernels one call launches, and their shares of device time (CUDA only)."""
        from torch.profiler import ProfilerActivity, profile

        activity = ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU
        inputs = self.rings[name].sets[0]
        self._call(name, inputs)
        self._sync()
        with profile(activities=[activity]) as session:
            self._call(name, inputs)
            self._sync()
        times: dict[str, float] = {}
        launches = 0
        for event in session.events() or []:
            if self.cuda and str(event.device_type).endswith("CUDA"):
                times[event.name] = times.get(event.name, 0.0) + event.device_time
                launches += 1
        total = sum(times.values()) or 1.0
        shares = sorted(((n[:120], t / total) for n, t in times.items()), key=lambda item: -item[1])[:8]
        return {"launches": launches, "kernels": shares}

    def _call(self, name: str, inputs: Any) -> tuple[torch.Tensor, ...]:
        guards.reset(self.threads)
        if (folder := self.folders.get(name)) is None:
            return self.functions[name](*inputs)
        with cache_folder(folder):
            return self.functions[name](*inputs)

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class _Compiled:
    """The reference as Inductor compiles it, without Dynamo's guards in the way: once for every set of shapes."""

    def __init__(self, function: Function, config: dict[str, Any]) -> None:
        self.function, self.config = function, config
        self.compiled: dict[Any, Any] = {}

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key = tuple((t.shape, t.stride()) for t in inputs)
        if key not in self.compiled:
            from torch._inductor.compile_fx import compile_fx

            traced = fx.symbolic_trace(self.function)
            self.compiled[key] = compile_fx(traced, list(inputs), config_patches=self.config)
        return tuple(self.compiled[key](*inputs))


def _same(tensor: torch.Tensor, dense: torch.Tensor) -> bool:
    if tensor.is_floating_point():
        return torch.equal(tensor.nan_to_num(), dense.nan_to_num())
    return torch.equal(tensor, dense)


_COMMANDS = ("load", "unload", "run", "stage", "time", "fetch", "profile")


def serve(sock: socket.socket, device: str, threads: int, cold_bytes: int) -> None:
    """Answers commands until the judge hangs up."""
    worker = Worker(device, threads, cold_bytes)
    if worker.cuda and torch.device(device).index is not None:
        torch.cuda.set_device(torch.device(device))
    guards.reset(threads)
    while True:
        try:
            message = wire.receive(sock)
        except wire.Closed:
            return
        command = message.pop("command")
        if command not in _COMMANDS:
            wire.send(sock, {"error": f"no command {command!r}"})
            continue
        try:
            reply = getattr(worker, command)(**message)
        except Exception as error:  # the worker's boundary: whatever a candidate raises becomes a reply
            reply = _failure(error)
        wire.send(sock, reply)
        if reply.get("fatal"):
            os._exit(3)


def _failure(error: Exception) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.endswith("kernel.py")]
    if own:
        text = f"line {own[-1].lineno}: {text}"
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    # After a device-side fault every later call of this process fails too: it must not be used again.
    fatal = isinstance(error, torch.AcceleratorError) or "CUDA error" in text or "device-side assert" in text
    return {"error": text[:4000], "memory": memory, "fatal": fatal and not memory}
