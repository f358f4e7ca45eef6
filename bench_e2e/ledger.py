"""The ledger: tokens/s of eager, Inductor, then one more family swapped at a time, and the default policy.

Each row is timed in turn with the row before it and with Inductor, on the same tokens from the same cache state, so that a drift of
the machine cancels and every comparison lies within one window. A row whose window saw a recompile, the recompile limit, a skipped
CUDA graph or a kernel that fell back is void. Before its time counts, a row's logits are compared with a run in higher precision
and its greedy tokens with eager's.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from jasperk_inductor import device as devices
from jasperk_inductor import explanation, planner, reference, stats, swap
from jasperk_inductor.backend import jasperk
from jasperk_inductor.contract import Swapped
from jasperk_inductor.errors import JasperkError
from jasperk_inductor.models import Session, card, letters

LOGIT_FACTOR = 1.05  # a row's largest logit error may be this many times Inductor's, plus LOGIT_SLACK
LOGIT_SLACK = 1e-6
STEPS_A_SAMPLE = 8  # on a GPU
CHECK_STEPS = 16  # decode steps whose tokens and logits are compared


def _plain(argument: str) -> str:
    """A folder by its name: where it lies on the measuring machine says nothing."""
    return Path(argument).name if Path(argument).is_absolute() else argument


@dataclass(frozen=True)
class Run:
    """What to measure."""

    model: str = "qwen3_8"
    size: str = "tiny"
    layers: int | None = None
    batch: int = 1
    context: int = 128
    capacity: int = 1280
    dtype: str = "float32"
    device: str = "cpu"
    mode: str = "default"
    rows: tuple[str, ...] = ()
    steps: int = 160
    weights: Path | None = None
    cache_dir: Path = Path()
    budget_s: float = 0.0
    families: tuple[str, ...] = ()  # in ledger order; () is all of the card
    command: str = field(default_factory=lambda: " ".join(["jasperk", *map(_plain, sys.argv[1:])]))


@dataclass(frozen=True)
class Row:
    """One configuration, measured. Times are milliseconds a decode step of the whole batch."""

    config: str
    batch: int
    ms_per_step: float
    tokens_per_s: float
    vs_inductor: float | None
    vs_inductor_interval: tuple[float, float] | None
    vs_previous: float | None
    vs_previous_interval: tuple[float, float] | None
    predicted_vs_previous: float | None
    valid: bool
    void: str
    tokens_equal: bool
    tokens_agree: float
    logit_error: float
    logit_rms: float
    inductor_logit_error: float
    inductor_logit_rms: float
    correct: bool
    swapped: dict[str, int]
    kept: dict[str, str]
    peak_memory_gb: float
    compile_s: float
    evaluations: int
    layers: int
    context: int
    capacity: int
    mode: str
    dtype: str
    cache: str
    samples_ms: tuple[float, ...]
    previous_samples_ms: tuple[float, ...]
    inductor_samples_ms: tuple[float, ...]
    device: str
    gpu: str
    gpu_uuid: str
    torch: str
    triton: str
    transformers: str
    commit: str
    date: str
    command: str


@dataclass
class _Compiled:
    name: str
    call: Callable[..., Any] | None
    report: explanation.GraphReport | None = None
    compile_s: float = 0.0
    logits: torch.Tensor | None = None
    error: float = 0.0
    rms: float = 0.0
    tokens_equal: bool = True
    tokens_agree: float = 1.0
    void: str = ""
    peak_gb: float = 0.0


class Ledger:
    """Measures rows one after the other. Iterate over `rows()`."""

    def __init__(self, run: Run) -> None:
        room = run.capacity - run.context
        if min(run.batch, run.context, run.steps) < 1 or room <= CHECK_STEPS + 1:
            raise JasperkError(
                f"batch {run.batch}, context {run.context} and steps {run.steps} must be at least 1, and the capacity {run.capacity} "
                f"must leave room for more than {CHECK_STEPS + 1} tokens after the context."
            )
        self.run, self.card = run, card(run.model)
        self.letters = letters(self.card)
        self.order = list(run.families or self.card.LETTERS)
        self.model = self._model()
        self.config: Any = self.model.config
        self.session = Session(self.model, run.batch, run.context, run.capacity)
        self.cuda = devices.device_type(run.device) == "cuda"
        self.block = STEPS_A_SAMPLE if self.cuda else 1

    def _model(self) -> Any:
        dtype = getattr(torch, self.run.dtype)
        if self.run.weights is None:
            return self.card.build(self.card.config(self.run.size, self.run.layers), device=self.run.device, dtype=dtype)
        from transformers import AutoModelForCausalLM

        if not (self.run.weights / "config.json").exists():
            raise JasperkError(f"{self.run.weights} holds no config.json; --weights wants a local checkpoint in transformers' layout.")
        model: Any = AutoModelForCausalLM.from_pretrained(self.run.weights, dtype=dtype, local_files_only=True)
        return model.to(self.run.device).eval()

    def names(self) -> list[str]:
        """The rows in order."""
        every = ["eager", "inductor", *(f"+{self.letters[f]}" for f in self.order), "jasperk"]
        wanted = self.run.rows or tuple(every)
        if unknown := [w for w in wanted if w not in every]:
            raise JasperkError(f"no row {unknown[0]!r}; rows are {', '.join(every)}.")
        return [e for e in every if e in wanted]

    @torch.no_grad()
    def rows(self) -> Iterator[Row]:
        """Measures and yields row after row."""
        self._start()
        eager = self._prepare("eager")
        inductor = self._prepare("inductor", eager)
        previous = eager
        for name in self.names():
            current = {"eager": eager, "inductor": inductor}.get(name) or self._prepare(name, eager)
            yield self._row(current, previous, inductor)
            previous = current

    def _start(self) -> None:
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64  # each row is one more compilation of the same code
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        explanation.forget()
        self.session.reset()
        prompt_logits = self.session.prefill()
        self.first = prompt_logits.argmax(-1, keepdim=True)
        self.session.mark()
        self.tokens = self._greedy()
        self.exact = self._exact()

    def _greedy(self) -> torch.Tensor:
        """Eager's own tokens, (steps, batch, 1): what every row is fed and compared with."""
        self.session.rewind()
        tokens = [self.first]
        for _ in range(CHECK_STEPS):
            tokens.append(self.session.decode(tokens[-1]).argmax(-1, keepdim=True))
        return torch.stack(tokens)

    def _exact(self) -> torch.Tensor:
        """Logits of the same steps in higher precision: float64, or float32 for a model in bf16 or fp16."""
        wide = torch.float64 if self.run.dtype == "float32" else torch.float32
        session = Session(self.model, self.run.batch, self.run.context, self.run.context + CHECK_STEPS + 1)
        with reference.widened(wide):
            session.prefill()
            return torch.stack([session.decode(t).float() if wide is torch.float32 else session.decode(t) for t in self.tokens[:-1]])

    def _prepare(self, name: str, eager: _Compiled | None = None) -> _Compiled:
        """Compiles a configuration and checks its tokens and logits."""
        before = len(explanation.reports())
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        skips = _counters()["a skipped CUDA graph"]
        compiled = _Compiled(name, self._compile(name))
        self._decode(compiled, 3)  # compiles, and records CUDA graphs
        compiled.void = "" if _counters()["a skipped CUDA graph"] == skips else "a skipped CUDA graph"
        compiled.compile_s = time.monotonic() - started
        reports = explanation.reports()[before:]
        compiled.report = reports[0] if reports else None
        logits = self._decode(compiled, CHECK_STEPS, keep=True)
        assert logits is not None
        off = [(a.double() - b.double()).abs() for a, b in zip(logits, self.exact, strict=True)]
        compiled.error = max(float(o.max()) for o in off)
        compiled.rms = float(torch.stack([(o * o).mean() for o in off]).mean().sqrt())
        tokens = logits.argmax(-1, keepdim=True)
        compiled.tokens_equal = torch.equal(tokens, self.tokens[1:])
        compiled.tokens_agree = float((tokens == self.exact.argmax(-1, keepdim=True)).float().mean())
        compiled.peak_gb = torch.cuda.max_memory_allocated() / 1e9 if self.cuda else psutil.Process().memory_info().rss / 1e9
        return compiled

    def _compile(self, name: str) -> Callable[..., Any] | None:
        if name == "eager":
            return None
        if name == "inductor":
            return torch.compile(self.model, mode=None if self.run.mode == "default" else self.run.mode)
        options: dict[str, Any] = {"cache_dir": str(self.run.cache_dir), "mode": self.run.mode, "budget_s": self.run.budget_s}
        if name != "jasperk":
            upto = [self.letters[f] for f in self.order].index(name[1:]) + 1
            options |= {"families": self.order[:upto], "beat": "eager"}

        def backend(gm: Any, example_inputs: Any) -> Any:  # not by name: the ledger also runs where nothing is installed
            return jasperk(gm, example_inputs, options=options)

        return torch.compile(self.model, backend=backend)

    def _decode(self, compiled: _Compiled, steps: int, keep: bool = False) -> torch.Tensor | None:
        """`steps` steps from the mark, fed with eager's tokens."""
        self.session.rewind()
        kept = []
        for i in range(steps):
            logits = self.session.decode(self.tokens[i % CHECK_STEPS], compiled.call)
            if keep:
                kept.append(logits.clone())
        return torch.stack(kept) if keep else None

    def _time(self, compiled: _Compiled, samples: int) -> list[float]:
        """Milliseconds a step. On a GPU a sample is a run of STEPS_A_SAMPLE steps with one synchronisation at its end: like a
        decoding loop, which need not wait for one step to start the next."""
        self.session.rewind()
        taken = []
        for i in range(samples):
            self._sync()
            start = time.perf_counter()
            for j in range(self.block):
                self.session.decode(self.tokens[(i * self.block + j) % CHECK_STEPS], compiled.call)
            self._sync()
            taken.append((time.perf_counter() - start) * 1e3 / self.block)
        return taken

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _row(self, current: _Compiled, previous: _Compiled, inductor: _Compiled) -> Row:
        gc.collect()
        sides = {id(c): c for c in (current, previous, inductor)}
        samples: dict[int, list[float]] = {k: [] for k in sides}
        rounds = 4
        room = (self.run.capacity - self.run.context - 1) // self.block
        per_round = max(1, min(self.run.steps // (rounds * self.block), room))
        for one in sides.values():
            self._time(one, 2)
        before = _counters()
        for _ in range(rounds):
            for key, one in sides.items():
                samples[key] += self._time(one, per_round)
        void = _void(before, _counters()) or current.void
        mine, prior, rival = (tuple(samples[id(c)]) for c in (current, previous, inductor))
        vs_inductor = stats.ratio(rival, mine) if current is not inductor else None
        vs_previous = stats.ratio(prior, mine) if current is not previous else None
        ms = stats.median(mine)
        report = current.report
        if report is not None and report.failure:
            void = f"jasperk failed: {report.failure}"
        run = self.run
        return Row(
            config=current.name, batch=run.batch, ms_per_step=ms, tokens_per_s=run.batch / ms * 1e3,
            vs_inductor=vs_inductor.value if vs_inductor else None,
            vs_inductor_interval=(vs_inductor.low, vs_inductor.high) if vs_inductor else None,
            vs_previous=vs_previous.value if vs_previous else None,
            vs_previous_interval=(vs_previous.low, vs_previous.high) if vs_previous else None,
            predicted_vs_previous=self._predict(current, previous, stats.median(prior)),
            valid=not void, void=void, tokens_equal=current.tokens_equal, tokens_agree=current.tokens_agree,
            logit_error=current.error, logit_rms=current.rms,
            inductor_logit_error=inductor.error, inductor_logit_rms=inductor.rms, correct=self._correct(current, inductor),
            swapped=self._swapped(report), kept=self._kept(report), peak_memory_gb=current.peak_gb,
            compile_s=current.compile_s, evaluations=report.evaluations if report else 0,
            layers=self.config.num_hidden_layers, context=run.context, capacity=run.capacity, mode=run.mode, dtype=run.dtype,
            cache=str(run.cache_dir.name), samples_ms=mine, previous_samples_ms=prior, inductor_samples_ms=rival, **provenance(run.device),
            command=run.command,
        )  # fmt: skip

    def _correct(self, current: _Compiled, inductor: _Compiled) -> bool:
        """In fp32: eager's very tokens, and no logit further off than Inductor's worst. In bf16, where two right runs differ by
        rounding: the error as a whole no larger than Inductor's, and as many of the exact run's tokens, give or take one step."""
        if current.name in ("eager", "inductor"):
            return True
        if self.run.dtype == "float32":
            return current.tokens_equal and current.error <= LOGIT_FACTOR * inductor.error + LOGIT_SLACK
        return current.rms <= LOGIT_FACTOR * inductor.rms and current.tokens_agree >= inductor.tokens_agree - 1 / CHECK_STEPS

    def _swapped(self, report: explanation.GraphReport | None) -> dict[str, int]:
        counts = explanation.Explanation((report,)).counts() if report else {}
        return {letter: counts[family] for family, letter in self.letters.items() if counts.get(family)}

    def _kept(self, report: explanation.GraphReport | None) -> dict[str, str]:
        kept = explanation.Explanation((report,)).kept if report else ()
        return {self.letters.get(o.family, o.family): o.reason for o in kept if o.reason != planner.OFF}

    def _predict(self, current: _Compiled, previous: _Compiled, previous_ms: float) -> float | None:
        """Amdahl: what the kernels' own times promise over the previous row, measured alone."""
        if current.report is None or previous.name == "eager":
            return None

        def saved(report: explanation.GraphReport | None) -> float:
            swapped = [o for o in (report.outcomes if report else ()) if isinstance(o, Swapped)]
            return sum((o.inductor_ms or 0.0) - (o.ms or 0.0) for o in swapped)

        left = previous_ms - (saved(current.report) - saved(previous.report))
        return previous_ms / left if left > 0 else None


def _counters() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {
        "a recompile": counters["stats"]["unique_graphs"],
        "a skipped CUDA graph": counters["inductor"]["cudagraph_skips"],
        "a kernel that fell back": sum(swap.fallbacks.values()),
    }


def _void(before: dict[str, int], after: dict[str, int]) -> str:
    return ", ".join(what for what in before if after[what] != before[what])


def provenance(device: str) -> dict[str, Any]:
    """Where and with what a figure was measured."""
    import transformers

    here = devices.validity(device)
    cuda = devices.device_type(device) == "cuda"
    uuid = str(torch.cuda.get_device_properties(torch.device(device)).uuid) if cuda else ""
    return {
        "device": here.device, "gpu": here.device if cuda else "", "gpu_uuid": uuid,
        "torch": torch.__version__, "triton": here.triton, "transformers": transformers.__version__,
        "commit": _commit(), "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip


def _commit() -> str:
    if given := os.environ.get("JASPERK_COMMIT"):  # for a copy of the tree without its history
        return given
    here = Path(__file__).resolve().parent
    commit = _said("git", "-C", str(here), "rev-parse", "--short=12", "HEAD").strip()
    return commit + ("+" if commit and _said("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no").strip() else "")


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def as_record(row: Row) -> dict[str, Any]:
    """A row as plain JSON data; times to the microsecond."""
    record = dataclasses.asdict(row)
    for key in ("samples_ms", "previous_samples_ms", "inductor_samples_ms"):
        record[key] = [round(s, 4) for s in record[key]]
    return record


__all__ = ["Ledger", "Row", "Run", "as_record", "provenance"]
