"""From a graph to a decision on every site: swapped for which kernel, or kept and why.

Each distinct problem is decided once. The cache answers first; where it has nothing, the optimizer may spend what is left of the
budget, on the problems that move the most bytes; the rest is noted as wanted, and kept. No lab module (evaluate, optimize) is
imported unless a kernel is missing and there is a budget to look for one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from . import device as devices
from . import stats, swap, trace
from .cache import Cache, Damaged
from .contract import Entry, Kept, Outcome, Problem, Site, Swapped, bucket
from .errors import UnknownOption, nearest
from .explanation import GraphReport
from .families import families, family
from .graph import value_of
from .languages import Kernel, language
from .languages.triton import cache_folder
from .settings import Options

log = logging.getLogger("jasperk")

OFF = "switched off by the option 'families'"

_caches: dict[str, Cache] = {}
_kernels: dict[str, Kernel] = {}  # loaded kernels by entry: shared by all graphs of this process
_said: set[str] = set()


def cache_for(options: Options) -> Cache:
    """The cache of these options; one object per directory and process."""
    key = str(options.cache_dir)
    if key not in _caches:
        _caches[key] = Cache(options.cache_dir)
    return _caches[key]


def plan_and_swap(graph: fx.Graph, options: Options, number: int, inductor: Mapping[str, Any]) -> GraphReport:
    """Finds the sites of a graph, decides on each, and rewrites the graph in place."""
    started = time.monotonic()
    found, kept = trace.sites(graph)
    decided: dict[int, Outcome] = {}
    swaps: dict[int, tuple[Site, swap.Operator]] = {}
    with _Planners(options, inductor) as planners:
        for site in _hottest_first(found):
            if not options.allows(site.family):
                decided[id(site)] = _keep(site, OFF)
                continue
            decided[id(site)], op = planners.decide(site)
            if op is not None:
                swaps[id(site)] = (site, op)
        evaluations = planners.evaluations
    chosen = [swaps[id(s)] for s in found if id(s) in swaps]
    swap.apply(graph, chosen)
    outcomes = (*(decided[id(s)] for s in found), *kept)
    operators = tuple(dict.fromkeys(op.name for _, op in chosen))
    dynamic = any(s.dynamic for s in found)
    return GraphReport(number, outcomes, None, evaluations, time.monotonic() - started, dynamic, operators)


def check_names(options: Options) -> None:
    """Checks the options that name something.

    Raises:
        UnknownOption: no such family or optimizer; the message names the nearest.
    """
    if options.optimizer not in ("library", "none"):
        from .optimize import OPTIMIZERS

        if options.optimizer not in OPTIMIZERS:
            raise UnknownOption(f"there is no optimizer {options.optimizer!r}.{nearest(options.optimizer, [*OPTIMIZERS, 'none'])}")
    for name in options.families or ():
        if name not in families():
            raise UnknownOption(f"option 'families' names {name!r}, which is no family.{nearest(str(name), families())}")


def _hottest_first(sites: Sequence[Site]) -> list[Site]:
    """Sites whose problems move the most bytes in this graph come first: they get the budget."""
    weight: dict[str, int] = {}
    for site in sites:
        weight[site.problem.hash] = weight.get(site.problem.hash, 0) + site.problem.nbytes(site.sizes)
    return sorted(sites, key=lambda s: -weight[s.problem.hash])


def _keep(site: Site, reason: str, **more: Any) -> Kept:
    return Kept(site.family, site.module, site.rows, reason, **more)


class _Planners:
    """One planner a device, since a model may lie on several; one budget for all."""

    def __init__(self, options: Options, inductor: Mapping[str, Any]) -> None:
        self.options, self.inductor = options, inductor
        self.deadline = time.monotonic() + (options.budget_s if options.optimizer != "none" else 0.0)
        self._planners: dict[str, _Planner] = {}

    def __enter__(self) -> _Planners:
        return self

    def __exit__(self, *_: object) -> None:
        for planner in self._planners.values():
            planner.close()

    @property
    def evaluations(self) -> int:
        return sum(planner.evaluations for planner in self._planners.values())

    def decide(self, site: Site) -> tuple[Outcome, swap.Operator | None]:
        device = value_of(site.inputs[0]).device
        if device.type not in ("cpu", "cuda"):
            return _keep(site, f"jasperk has no kernels for tensors on {device.type!r}"), None
        if str(device) not in self._planners:
            self._planners[str(device)] = _Planner(self.options, str(device), self.inductor, self.deadline)
        return self._planners[str(device)].decide(site)


class _Planner:
    """Decides site by site on one device, each distinct problem once; owns the evaluator if one is needed."""

    def __init__(self, options: Options, device: str, inductor: Mapping[str, Any], deadline: float) -> None:
        self.options, self.device, self.inductor, self.deadline = options, device, inductor, deadline
        self.cache = cache_for(options)
        self.here = devices.validity(device)
        self.decided: dict[Any, tuple[Outcome, swap.Operator | None]] = {}
        self._evaluator: Any = None

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()

    @property
    def evaluations(self) -> int:
        return self._evaluator.evaluations if self._evaluator is not None else 0

    def decide(self, site: Site) -> tuple[Outcome, swap.Operator | None]:
        key = (site.problem.hash, bucket(site.rows), site.dynamic)
        if key not in self.decided:
            self.decided[key] = self._decide(site)
        outcome, op = self.decided[key]
        return replace(outcome, module=site.module, rows=site.rows), op

    def _decide(self, site: Site) -> tuple[Outcome, swap.Operator | None]:
        problem, options = site.problem, self.options
        if options.identity:
            op = swap.operator(problem, {})
            return Swapped(site.family, site.module, site.rows, "identity (its own subgraph)", op.name), op
        entry, reason = self._entry(problem, site)
        if entry is None:
            return _keep(site, reason), None
        gain = self.gain(entry)
        if not gain.faster:
            rival = "Inductor" if options.beat == "inductor" else "eager"
            return _keep(site, f"{gain.verdict} against {rival}: {gain}", kernel=entry.candidate.describe(), gain=gain.value), None
        kernels = self._kernels(problem, site, entry)
        if isinstance(kernels, str):
            return _keep(site, kernels, kernel=entry.candidate.describe()), None
        op = swap.operator(problem, kernels)
        swap.first_call(op, site.sizes, self.device)
        if options.verify and (differs := swap.agrees(op, site.sizes, self.device)) is not None:
            return _keep(site, f"verify: {differs}", kernel=entry.candidate.describe()), None
        limit = devices.peaks(self.device).limit_ms(problem.nbytes(site.sizes), family(site.family).flops(problem, site.sizes))
        assert entry.verdict.latency is not None
        ms, inductor_ms = stats.median(entry.verdict.latency.candidate), stats.median(entry.verdict.latency.baseline("inductor"))
        return Swapped(
            site.family, site.module, site.rows, entry.candidate.describe(), op.name, gain.value, limit / ms, ms, inductor_ms
        ), op

    def gain(self, entry: Entry) -> stats.Ratio:
        assert entry.verdict.latency is not None
        return stats.ratio(entry.verdict.latency.baseline(self.options.beat), entry.verdict.latency.candidate)

    def _entry(self, problem: Problem, site: Site) -> tuple[Entry | None, str]:
        """The cached entry, or one that the optimizer finds within the budget, or why there is none."""
        if (entry := self.cache.get(problem, site.rows, self.here)) is not None:
            return entry, ""
        stale = self.cache.why_not(problem, site.rows, self.here)
        left = self.deadline - time.monotonic()
        if self.options.optimizer != "none":
            from .optimize import improve, optimizer

            chosen = optimizer(self.options.optimizer)
            fingerprint = chosen.fingerprint(problem, site.sizes, self.device)
            tried = self.cache.attempt(problem, site.rows, self.here, fingerprint)
            if tried is not None:
                return None, f"the optimizer found no kernel: {tried.reason}"
            if left > 0:
                once("looking for kernels for the first time; this compile may take "
                      f"{self.options.budget_s:.0f} s longer (option budget_s), later ones will not", logging.INFO)  # fmt: skip
                if self._evaluator is None:
                    from .evaluate import Evaluator

                    self._evaluator = Evaluator(self.device, inductor=_uncaptured(self.inductor))
                result = improve(
                    problem, site.sizes, cache=self.cache, evaluator=self._evaluator, name=self.options.optimizer, budget_s=left
                )
                if isinstance(result, Entry):
                    return result, ""
                if time.monotonic() < self.deadline:
                    return None, f"the optimizer found no kernel: {result.reason}"
        self.cache.want(problem, site.sizes, devices.device_type(self.device))
        missing = f"the cached entry does not hold here ({stale})" if stale else "no kernel yet"
        return None, f"{missing}; build it with `jasperk optimize --wanted --cache-dir {self.options.cache_dir}`"

    def _kernels(self, problem: Problem, site: Site, entry: Entry) -> dict[int, tuple[str, Kernel]] | str:
        """The loaded kernels of an operator: this bucket's, and for a dynamic site all others that win as well."""
        entries = {entry.bucket: entry}
        if site.dynamic:
            for rows in self.cache.buckets(problem, self.here):
                other = self.cache.get(problem, rows, self.here)
                if other is not None and rows not in entries and self.gain(other).faster:
                    entries[rows] = other
        loaded: dict[int, tuple[str, Kernel]] = {}
        for rows, one in entries.items():
            try:
                loaded[rows] = (one.hash, self._load(one, site))
            except (Damaged, OSError) as damaged:
                if one is entry:
                    return f"its cached kernel is damaged ({damaged}); the next compile builds it again"
        return loaded

    def _load(self, entry: Entry, site: Site) -> Kernel:
        if entry.hash not in _kernels:
            folder = self.cache.materialise(entry)
            kernel = language(entry.candidate.language).load(folder, entry.candidate, entry.problem.spec)
            with cache_folder(folder):  # Triton finds its binaries there, if the entry is one of its own
                with torch.no_grad():
                    kernel(*swap.random_inputs(entry.problem, _sizes_in(entry), self.device))
            _kernels[entry.hash] = kernel
        return _kernels[entry.hash]


def _sizes_in(entry: Entry) -> dict[str, int]:
    return dict(entry.verdict.sizes)


def _uncaptured(inductor: Mapping[str, Any]) -> dict[str, Any]:
    """The same Inductor, without its CUDA graphs: the evaluator captures both sides itself."""
    return {k: v for k, v in inductor.items() if k not in ("triton.cudagraphs", "triton.cudagraph_trees")}


def once(message: str, level: int = logging.WARNING) -> None:
    if message not in _said:
        _said.add(message)
        log.log(level, message)
