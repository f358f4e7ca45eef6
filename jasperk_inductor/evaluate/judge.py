"""The judge: secret seeds, reference outputs, the clock, and the verdict.

Three processes. The judge (this one) draws the inputs and compares; it never imports candidate code. A reference worker runs the
user's own subgraph, eagerly, compiled by Inductor, and in float64. A candidate worker runs the candidate and knows nothing that
it could cheat with: no reference, no seeds, no expected outputs. The verdict follows from data and raw samples that the judge
holds; times that a candidate's side reports are bounded by the judge's own clock around sealed batches, two lengths of batch in
turn, so that the cost of the conversation cancels.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from .. import device as devices
from .. import stats
from ..contract import Accuracy, Candidate, Latency, Problem, Profile, Sizes, Status, Verdict, to_json
from ..errors import MissingTool
from ..families import families
from ..languages import BuildFailed, language
from . import checks, wire
from .inputs import STYLES, activations, draw, trial_sizes
from .sandbox import Failed, Handle, Lost, Zygote, scratch
from .timing import ring_length

TRIALS = 5
VARIANTS = 8  # of the activations in a timed ring
ROUNDS = 12  # of interleaved timing
BUILD_S, CALL_S, COMPILE_S = 120.0, 60.0, 600.0


class Rejected(Exception):
    """Ends an evaluation with a status."""

    def __init__(self, status: Status, message: str, accuracy: Accuracy | None = None) -> None:
        super().__init__(message)
        self.status, self.accuracy = status, accuracy


class Evaluator:
    """Evaluates candidates on one device. Use it as a context manager: it owns processes and folders.

    Args:
        device: "cpu" or "cuda[:n]".
        inductor: Inductor config patches for the compiled reference, i.e. what would run otherwise.
        clock: "graph" or "wall"; default "graph" on a GPU, "wall" on a CPU.
        memory_bytes: most main memory for one worker.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        inductor: Mapping[str, Any] | None = None,
        clock: str | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.cuda = devices.device_type(device) == "cuda"
        self.clock = clock or ("graph" if self.cuda else "wall")
        self.inductor = dict(inductor or {})
        self.memory_bytes = memory_bytes or int(psutil.virtual_memory().total * 0.75)
        self.evaluations = 0
        self._threads = torch.get_num_threads()
        self._cold = devices.l2_bytes(device)
        self._zygote = Zygote()
        self._folder = scratch("jasperk-judge-")
        self._reference: tuple[str, Handle] | None = None
        self._rng = random.Random(secrets.randbits(128))

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers and removes all folders."""
        if self._reference is not None:
            self._reference[1].close()
            self._reference = None
        self._zygote.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------ evaluate

    def evaluate(self, problem: Problem, candidate: Candidate, sizes: Sizes, folder: Path | None = None) -> Verdict:
        """The full protocol for one candidate.

        Args:
            sizes: where to time; correctness is checked over the whole bucket of rows around it.
            folder: where to build; what `Language.load` needs stays there. Default: a folder that is removed.

        Returns:
            A Verdict; a candidate's failure never raises.
        """
        self.evaluations += 1
        started = time.monotonic()
        place = Path(folder) if folder is not None else Path(scratch("jasperk-build-"))
        worker: Handle | None = None
        try:
            self._build(problem, candidate, place)
            worker = self._worker()
            self._load(worker, "candidate", problem, candidate, place)
            accuracy = self._correct(worker, problem, sizes)
            latency, profile = self._timed(worker, problem, sizes)
            verdict = Verdict(Status.PASSED, "", accuracy, latency, profile)
        except Rejected as rejected:
            verdict = Verdict(rejected.status, str(rejected), rejected.accuracy)
        except (Lost, Failed) as lost:
            verdict = Verdict(lost.status, str(lost))
        finally:
            if worker is not None:
                worker.close()
            if folder is None:
                shutil.rmtree(place, ignore_errors=True)
        seconds = time.monotonic() - started
        return Verdict(verdict.status, verdict.message, verdict.accuracy, verdict.latency, verdict.profile, tuple(sizes.items()), seconds)

    def _build(self, problem: Problem, candidate: Candidate, folder: Path) -> None:
        chosen = language(candidate.language)
        if (refused := chosen.screen(candidate.source)) is not None:
            raise Rejected(*refused)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            chosen.build(candidate, problem.spec, folder, BUILD_S)
        except BuildFailed as failed:
            raise Rejected(failed.status, str(failed)) from None
        except MissingTool as missing:
            raise Rejected(Status.INFRASTRUCTURE, str(missing)) from None

    def _worker(self, environment: Mapping[str, str] | None = None) -> Handle:
        return Handle(self._zygote, self.device, self._threads, self._cold, self.memory_bytes, environment)

    def _load(self, worker: Handle, name: str, problem: Problem, candidate: Candidate, folder: Path) -> None:
        worker.call(
            "load", CALL_S, name=name, kind="candidate", spec=to_json(problem.spec), candidate=to_json(candidate), folder=str(folder)
        )

    def reference(self, problem: Problem) -> Handle:
        """The reference worker for a problem: kept for the next candidate of the same problem, replaced if it died."""
        if self._reference is not None:
            known, worker = self._reference
            if known == problem.hash and worker.alive:
                return worker
            worker.close()
            self._reference = None
        # References share compile caches among themselves, never with a candidate or the user.
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"), "TRITON_CACHE_DIR": str(self._folder / "triton")}
        # One kernel or two are to be compiled: a pool of compile processes would take longer to start than to help.
        worker = self._worker(caches | {"TORCHINDUCTOR_COMPILE_THREADS": "1"})
        spec = to_json(problem.spec)
        try:
            for kind in ("eager", "exact", "inductor"):
                worker.call("load", CALL_S, name=kind, kind=kind, spec=spec, source=problem.reference, config=self.inductor)
        except BaseException:
            worker.close()
            raise
        self._reference = (problem.hash, worker)
        return worker

    def _ask_reference(self, problem: Problem, command: str, timeout: float = COMPILE_S, **fields: Any) -> dict[str, Any]:
        """A failure of the reference is never the candidate's fault."""
        try:
            return self.reference(problem).call(command, timeout, **fields)
        except (Lost, Failed) as lost:
            raise Rejected(Status.INFRASTRUCTURE, f"the reference failed ({lost.status}): {lost}") from None

    # --------------------------------------------------------------------------------------------------- correctness

    def _correct(self, worker: Handle, problem: Problem, sizes: Sizes) -> Accuracy:
        worst: Accuracy | None = None
        for trial, at in enumerate(trial_sizes(problem, sizes, self._rng, TRIALS)):
            accuracy = self._trial(worker, problem, at, STYLES[trial % len(STYLES)], compiled=trial == 0)
            worst = checks.worse(worst, accuracy)
        assert worst is not None
        return worst

    def _trial(self, worker: Handle, problem: Problem, sizes: Sizes, style: str, *, compiled: bool, name: str = "candidate") -> Accuracy:
        folder = self._folder / secrets.token_hex(8)
        folder.mkdir()
        try:
            inputs = draw(problem, sizes, style, secrets.randbits(62), self.device)
            # Each side gets a file of its own, so that neither can reach the other's.
            given, own = worker.folder / f"in-{folder.name}", folder / "inputs"
            wire.write_tensors(own, inputs)
            shutil.copyfile(own, given)
            forms = ["eager"] + (["exact"] if problem.tolerance.fp64_factor is not None else []) + (["inductor"] if compiled else [])
            expected: dict[str, list[torch.Tensor]] = {}
            for form in forms:
                path = folder / form
                self._ask_reference(problem, "run", name=form, inputs=str(own), outputs=str(path))
                expected[form] = _numbered(wire.read_tensors(path))
            path = worker.folder / f"out-{folder.name}"
            reply = worker.call("run", CALL_S, name=name, inputs=str(given), outputs=str(path), check_state=True)
            self._well_behaved(problem, sizes, reply)
            outputs = _numbered(self._read(path))
            self._as_described(outputs, reply)
            status, message, accuracy = checks.judge_outputs(
                problem.spec, problem.tolerance, outputs, expected["eager"], expected.get("exact"), expected.get("inductor")
            )
            if status is not Status.PASSED:
                where = ", ".join(f"{k}={v}" for k, v in sizes.items())
                raise Rejected(status, f"{message} (inputs: {style}; {where})", accuracy)
            given.unlink()
            path.unlink()
            return accuracy
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _well_behaved(self, problem: Problem, sizes: Sizes, reply: dict[str, Any]) -> None:
        if "structure" in reply:
            raise Rejected(Status.WRONG_STRUCTURE, f"it returned {reply['structure']}; a tuple of tensors is wanted")
        if (wrong := checks.structure(problem.spec, sizes, reply["outputs"], [t.role for t in problem.outputs])) is not None:
            raise Rejected(*wrong)
        if changed := [r for r in reply["changed_inputs"] if r not in problem.mutated]:
            raise Rejected(Status.INPUT_CHANGED, f"it changed its input {', '.join(changed)}")
        if reply["aliased"]:
            roles = [problem.outputs[i].role for i in reply["aliased"]]
            raise Rejected(Status.OUTPUT_ALIASED, f"{', '.join(roles)} lies in the memory of an input")
        if reply["changed_state"]:
            raise Rejected(Status.STATE_CHANGED, f"it changed {', '.join(reply['changed_state'])}")

    def _read(self, path: Path) -> dict[str, torch.Tensor]:
        try:
            return wire.read_tensors(path)
        except Exception as error:  # whatever is in a file that a candidate could write: it is not a tensor file
            raise Rejected(Status.PROTOCOL, f"its outputs cannot be read: {error}") from None

    @staticmethod
    def _as_described(outputs: Sequence[torch.Tensor], reply: dict[str, Any]) -> None:
        got = [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in outputs]
        if got != [(d["shape"], d["dtype"]) for d in reply["outputs"]]:
            raise Rejected(Status.PROTOCOL, "the outputs in its file are not those that it described")

    # -------------------------------------------------------------------------------------------------------- timing

    def _timed(self, worker: Handle, problem: Problem, sizes: Sizes) -> tuple[Latency, Profile]:
        length = self._ring_length(problem, sizes)
        variants = min(VARIANTS, length)
        staged = self._stage_file(problem, sizes, variants, worker)
        sides: dict[str, tuple[Any, str]] = {
            "candidate": (worker.call, "candidate"),
            "eager": (lambda c, t, **f: self._ask_reference(problem, c, t, **f), "eager"),
            "inductor": (lambda c, t, **f: self._ask_reference(problem, c, t, **f), "inductor"),
        }
        fields: dict[str, Any] = {"variants": variants, "length": length, "clock": self.clock}
        own = self._ask_reference(problem, "stage", names=["eager", "inductor"], inputs=str(staged[1]), **fields)
        worker.call("stage", CALL_S, names=["candidate"], inputs=str(staged[0]), **fields)
        flush_ms = max(own["flush_ms"].values(), default=0.0)
        repeats = self._repeats(problem, sides, length)
        samples: dict[str, list[float]] = {name: [] for name in sides}
        unexplained: dict[int, list[float]] = {repeats: [], 2 * repeats: []}
        order = list(sides)
        for round_ in range(ROUNDS):
            count = repeats * (1 + round_ % 2)
            for name in order[round_ % 3 :] + order[: round_ % 3]:
                call, function = sides[name]
                start = time.perf_counter()
                reply = call("time", CALL_S, name=function, repeats=count, clock=self.clock)
                wall = (time.perf_counter() - start) * 1e3
                if name == "candidate":
                    self._plausible(reply["samples_ms"], count)
                    claimed = sum(reply["samples_ms"]) + count * (flush_ms if self.clock == "graph" else 0.0)
                    unexplained[count].append(wall - claimed * (length if self.clock == "graph" else 1))
                samples[name] += reply["samples_ms"][:repeats]
        self._bounded(stats.median(samples["candidate"]), unexplained, length)
        self._possible(problem, sizes, samples["candidate"])
        self._fresh(worker, problem, sizes, length, variants, staged[1])
        profile: dict[str, Any] = worker.call("profile", CALL_S, name="candidate") if self.cuda else {"launches": 0, "kernels": []}
        latency = Latency(self.clock, *(tuple(samples[n]) for n in ("candidate", "eager", "inductor")))
        return latency, Profile(profile["launches"], tuple((str(n), float(s)) for n, s in profile["kernels"]))

    def _ring_length(self, problem: Problem, sizes: Sizes) -> int:
        parameters = sum(t.nbytes(sizes) for t in problem.inputs if t.kind != "activation")
        return ring_length(parameters, problem.nbytes(sizes), self._cold, self.cuda)

    def _stage_file(self, problem: Problem, sizes: Sizes, variants: int, worker: Handle) -> tuple[Path, Path]:
        """Inputs of a timed ring: parameters once, activations in several variants. One copy a side."""
        tensors: dict[str, torch.Tensor] = {}
        roles = {t.role for t in activations(problem)}
        for i in range(variants):
            for role, tensor in draw(problem, sizes, "normal", secrets.randbits(62), self.device).items():
                if role in roles:
                    tensors[f"{role}.{i}"] = tensor
                else:
                    tensors.setdefault(role, tensor)
        theirs, ours = worker.folder / f"ring-{secrets.token_hex(4)}", self._folder / f"ring-{secrets.token_hex(4)}"
        for old in self._folder.glob("ring-*"):
            old.unlink()
        wire.write_tensors(ours, tensors)
        shutil.copyfile(ours, theirs)
        return theirs, ours

    def _repeats(self, problem: Problem, sides: Mapping[str, tuple[Any, str]], length: int) -> int:
        """Calls (or replays) in a short batch, the same for all sides: about 10 ms of the slowest, at least 4."""
        slowest = 0.0
        for call, function in sides.values():
            reply = call("time", CALL_S, name=function, repeats=4, clock=self.clock)
            slowest = max(slowest, stats.median(reply["samples_ms"]))
        per_sample = slowest * (length if self.clock == "graph" else 1)
        return int(max(4, min(200, 10.0 / max(per_sample, 1e-3))))

    @staticmethod
    def _plausible(samples: Any, count: int) -> None:
        fine = isinstance(samples, list) and len(samples) == count
        if not fine or not all(isinstance(s, float | int) and 0 <= s < 1e7 for s in samples):
            raise Rejected(Status.PROTOCOL, "its time samples are not what was asked for")

    def _bounded(self, reported: float, unexplained: Mapping[int, Sequence[float]], length: int) -> None:
        """The judge's own clock. What a batch's wall time holds beyond the times that were reported for it is the cost of the
        conversation: the same for a short batch and for one of twice the length. If it grows with the length, calls took longer
        than was said."""
        short, long = sorted(unexplained)
        calls = (long - short) * (length if self.clock == "graph" else 1)
        hidden = (stats.median(unexplained[long]) - stats.median(unexplained[short])) / calls
        if hidden > 0.5 * reported + 0.5 / calls + 0.002:
            raise Rejected(
                Status.TIMING_UNBOUNDED,
                f"it reports {reported:.4g} ms a call; the judge's clock saw {reported + hidden:.4g} ms pass for each",
            )

    def _possible(self, problem: Problem, sizes: Sizes, samples: Sequence[float]) -> None:
        if not self.cuda:
            return  # a CPU's caches outrun its memory by an unknown factor, so there is no floor to hold it to
        family = families().get(problem.family)
        flops = family.flops(problem, sizes) if family is not None else 0.0
        limit = devices.peaks(self.device).limit_ms(problem.nbytes(sizes), flops)
        if (took := stats.median(samples)) < 0.9 * limit:
            raise Rejected(Status.IMPOSSIBLE_TIME, f"{took:.4g} ms a call; moving the bytes alone takes {limit:.4g} ms on this device")

    def _fresh(self, worker: Handle, problem: Problem, sizes: Sizes, length: int, variants: int, staged: Path) -> None:
        """Outputs of randomly chosen timed calls must be right as well: no call may be skipped, replayed or left out."""
        calls = sorted(self._rng.sample(range(length), min(3, length)))
        path, own = worker.folder / "fetched", self._folder / "fetched"
        worker.call("fetch", CALL_S, name="candidate", calls=calls, outputs=str(path))
        self._ask_reference(problem, "fetch", name="eager", calls=calls, outputs=str(own))
        got, wanted = self._read(path), wire.read_tensors(own)
        for call in calls:
            for i, spec in enumerate(problem.outputs):
                key = f"{call}.{i}"
                if key not in got or got[key].shape != wanted[key].shape or got[key].dtype != wanted[key].dtype:
                    raise Rejected(Status.STALE_OUTPUT, f"a timed call left no {spec.role}")
            outputs, expected = [[t[f"{call}.{i}"] for i in range(len(problem.outputs))] for t in (got, wanted)]
            status, message, accuracy = checks.judge_outputs(problem.spec, problem.tolerance, outputs, expected)
            if status is not Status.PASSED:
                raise Rejected(Status.STALE_OUTPUT, f"a timed call's output is wrong: {message}", accuracy)

    # ---------------------------------------------------------------------------------------------------------- rank

    def rank(
        self, problem: Problem, candidates: Sequence[Candidate], sizes: Sizes, deadline: float, parallel: int | None = None
    ) -> list[tuple[Candidate, float, str]]:
        """Orders candidates by a quick time, best first: build, one correctness trial, a few samples. For searching only:
        what comes out on top is then evaluated in full.

        Args:
            deadline: time.monotonic() after which no further candidate is started.
            parallel: candidates built and tried at a time (timing is one at a time).

        Returns:
            (candidate, milliseconds, why it failed); failed ones are last, with infinite time.
        """
        parallel = parallel or max(1, min(4, (os.cpu_count() or 1) // 2))
        results: list[tuple[Candidate, float, str]] = []
        for start in range(0, len(candidates), parallel):
            if time.monotonic() > deadline and start:
                break
            chunk = candidates[start : start + parallel]
            with ThreadPoolExecutor(len(chunk)) as pool:
                tried = list(pool.map(lambda c: self._try(problem, c, sizes), chunk))
            for candidate, (worker, why) in zip(chunk, tried, strict=True):
                took = float("inf")
                if worker is not None:
                    try:
                        took = self._quick_time(worker, problem, sizes)
                    except (Rejected, Lost, Failed) as failed:
                        why = f"{failed.status}: {failed}"
                    finally:
                        worker.close()
                results.append((candidate, took, why))
        return sorted(results, key=lambda r: r[1])

    def _try(self, problem: Problem, candidate: Candidate, sizes: Sizes) -> tuple[Handle | None, str]:
        folder = scratch("jasperk-build-")
        worker: Handle | None = None
        try:
            self._build(problem, candidate, folder)
            worker = self._worker()
            shutil.move(str(folder), worker.folder / "built")
            self._load(worker, "candidate", problem, candidate, worker.folder / "built")
            inputs = draw(problem, sizes, "normal", secrets.randbits(62), self.device)
            wire.write_tensors(worker.folder / "in", inputs)
            reply = worker.call("run", CALL_S, name="candidate", inputs=str(worker.folder / "in"), outputs=str(worker.folder / "out"))
            self._well_behaved(problem, sizes, {"changed_state": [], **reply})
            return worker, ""
        except (Rejected, Lost, Failed) as failed:
            if worker is not None:
                worker.close()
            return None, f"{failed.status}: {failed}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _quick_time(self, worker: Handle, problem: Problem, sizes: Sizes) -> float:
        length = self._ring_length(problem, sizes)
        theirs, _ = self._stage_file(problem, sizes, 1, worker)
        worker.call("stage", CALL_S, names=["candidate"], inputs=str(theirs), variants=1, length=length, clock=self.clock)
        reply = worker.call("time", CALL_S, name="candidate", repeats=12 if self.cuda else 60, clock=self.clock)
        return stats.median(reply["samples_ms"])


def _numbered(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[str(i)] for i in range(len(tensors))]
