"""The judge gives each failure its own status, survives all of them, and accepts honest kernels."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import SCALE_CPP, card_problems, scale_problem

from jasperk_inductor import stats
from jasperk_inductor.contract import Candidate, Problem, Status, Tolerance
from jasperk_inductor.evaluate import Evaluator, judge
from jasperk_inductor.evaluate.sandbox import Handle, Zygote
from jasperk_inductor.families import families, kernels_dir
from jasperk_inductor.languages import bundle

PROBLEM = scale_problem()
SIZES = {"r0": 6}
BODY = "for (int64_t r = 0; r < JK_SIZE(x, 0); r++)"


def cpp(source: str, evaluator: Evaluator, problem: Problem = PROBLEM):
    return evaluator.evaluate(problem, Candidate("cpp", source), SIZES)


def broken(how: str) -> str:
    """The honest kernel with one statement put before its loop."""
    return SCALE_CPP.replace(BODY, f"{how}\n  {BODY}")


def test_an_honest_kernel_passes(evaluator: Evaluator) -> None:
    verdict = cpp(SCALE_CPP, evaluator)
    assert verdict.status is Status.PASSED, verdict.message
    assert verdict.latency is not None
    assert verdict.latency.clock == "wall"
    assert min(map(len, (verdict.latency.candidate, verdict.latency.eager, verdict.latency.inductor))) >= 30
    assert verdict.accuracy is not None
    assert verdict.accuracy.within == 1.0
    assert verdict.sizes == (("r0", 6),)


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        (SCALE_CPP.replace("* 2 + 1", "* 2 + 1.5f"), Status.MISMATCH, "elements within tolerance"),
        (SCALE_CPP.replace("* 2 + 1", "* 2.002f + 1"), Status.LESS_ACCURATE, "float64"),
        (SCALE_CPP.replace("* 2 + 1", "* 2 + 0.0f / 0.0f"), Status.NOT_FINITE, "NaN"),
        (SCALE_CPP.replace("* 2 + 1", "* (r < 1 ? 2 : 0) + 1"), Status.MISMATCH, "within tolerance"),
        (broken("const_cast<float*>(x)[0] = 7;"), Status.INPUT_CHANGED, "input x"),
        (broken("*(volatile int*)nullptr = 1;"), Status.CRASHED, "SIGSEGV"),
        (broken("__builtin_trap();"), Status.CRASHED, "SIGILL"),
        (broken("return 3;"), Status.RAISED, "error code 3"),
        (SCALE_CPP.replace("float* y", "flot* y"), Status.BUILD_FAILED, "flot"),
        ("int main() {}", Status.NO_CUSTOM_KERNEL, "jasperk_run"),
    ],
)
def test_each_failure_has_its_status(source: str, status: Status, said: str, evaluator: Evaluator) -> None:
    verdict = cpp(source, evaluator)
    assert verdict.status is status, verdict.message
    assert said in verdict.message
    assert verdict.latency is None


def test_a_kernel_that_is_right_for_one_size_only(evaluator: Evaluator) -> None:
    assert cpp(broken("if (JK_SIZE(x, 0) != 6) return 0;"), evaluator).status in (Status.MISMATCH, Status.NOT_FINITE)


def test_a_hang_is_ended_and_the_next_candidate_is_judged(monkeypatch: pytest.MonkeyPatch, evaluator: Evaluator) -> None:
    monkeypatch.setattr(judge, "CALL_S", 2.0)
    started = time.monotonic()
    verdict = cpp(broken("for (volatile int i = 0;; i++);"), evaluator)
    assert verdict.status is Status.TIMEOUT
    assert time.monotonic() - started < 15
    monkeypatch.undo()
    assert cpp(SCALE_CPP, evaluator).status is Status.PASSED


def test_memory_hogs_are_ended(evaluator: Evaluator) -> None:
    evaluator.memory_bytes, before = 1 << 30, evaluator.memory_bytes
    try:
        hog = "#include <vector>\n" + broken(
            "static std::vector<char> v[64]; for (auto& c : v) { c.assign(1 << 28, 1); }\n  for (volatile int i = 0;; i++);"
        )
        verdict = cpp(hog, evaluator)
    finally:
        evaluator.memory_bytes = before
    assert verdict.status is Status.OUT_OF_MEMORY, verdict.message


def test_a_slow_start_is_no_excuse(evaluator: Evaluator) -> None:
    lazy = broken("static int calls = 0; if (++calls > 40) return 0;  // stops working once it believes it is being timed")
    assert cpp(lazy, evaluator).status is Status.STALE_OUTPUT


def test_strided_inputs_are_tried_as_declared(evaluator: Evaluator) -> None:
    dense_only = SCALE_CPP.replace("JK_STRIDE(x, 0)", "JK_SIZE(x, 1)")
    assert cpp(dense_only, evaluator).status is Status.PASSED
    for layout in ("pitched:80", "strided"):
        problem = scale_problem(layout=layout)
        assert cpp(SCALE_CPP, evaluator, problem).status is Status.PASSED
        assert cpp(dense_only, evaluator, problem).status in (Status.MISMATCH, Status.NOT_FINITE)


def test_a_python_candidate_that_lies_about_time(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The static screen would refuse it; the judge's own clock must catch it as well."""
    from jasperk_inductor.languages import LANGUAGES

    monkeypatch.setattr(
        judge, "language", lambda name: type(LANGUAGES[name])(**{**LANGUAGES[name].__dict__, "screen": lambda source: None})
    )
    liar = (
        "import time\nimport torch\nfrom jasperk_inductor.evaluate import timing\n"
        "real = time.perf_counter\nstate = {'t': 0.0}\n"
        "def clock():\n    state['t'] += 1e-7\n    return state['t']\n"
        "def run(x):\n"
        "    timing.time.perf_counter = clock\n"
        "    end = real() + 0.001\n"
        "    while real() < end:\n        pass\n"
        "    return x * 2 + 1\n"
    )
    verdict = evaluator.evaluate(PROBLEM, Candidate("torch", liar), SIZES)
    assert verdict.status is Status.TIMING_UNBOUNDED, verdict.message


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("return x.mul_(2).add_(1)", Status.INPUT_CHANGED),
        ("return x", Status.OUTPUT_ALIASED),
        ("return x.clone()", Status.MISMATCH),
        ("torch.set_default_dtype(torch.float64)\n    return (x * 2 + 1).float()", Status.STATE_CHANGED),
        ("torch.backends.cuda.matmul.allow_tf32 = True\n    return x * 2 + 1", Status.STATE_CHANGED),
        ("os.environ['X'] = '1'\n    return x * 2 + 1", Status.STATE_CHANGED),
        ("return [x * 2 + 1][0].double()", Status.WRONG_DTYPE),
        ("return (x * 2 + 1).t().contiguous().t()", Status.WRONG_STRIDES),
        ("return {'y': x * 2 + 1}", Status.WRONG_STRUCTURE),
        ("return x * 2 + 1, x", Status.WRONG_STRUCTURE),
        ("raise RuntimeError('no')", Status.RAISED),
        ("os._exit(0)", Status.PROTOCOL),
        ("os._exit(5)", Status.PROTOCOL),
        ("os.kill(os.getpid(), 9)", Status.OUT_OF_MEMORY),
        ("os.close(3)\n    [os.close(i) for i in range(4, 64) if _open(i)]\n    time.sleep(60)", Status.PROTOCOL),
        ("print('x' * 100_000_000)\n    time.sleep(60)", Status.PROTOCOL),
    ],
)
def test_what_a_hostile_module_can_do(body: str, status: Status, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the static screen, so that the processes alone must hold."""
    from jasperk_inductor.languages import LANGUAGES

    monkeypatch.setattr(
        judge, "language", lambda name: type(LANGUAGES[name])(**{**LANGUAGES[name].__dict__, "screen": lambda source: None})
    )
    monkeypatch.setattr(judge, "CALL_S", 10.0)
    open_ = "def _open(i):\n    try:\n        os.fstat(i)\n        return True\n    except OSError:\n        return False\n"
    source = f"import os\nimport time\nimport torch\n{open_}def run(x):\n    {body}\n"
    verdict = evaluator.evaluate(PROBLEM, Candidate("torch", source), SIZES)
    assert verdict.status is status, verdict.message


def test_an_output_in_an_inputs_memory(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    from jasperk_inductor.languages import LANGUAGES

    monkeypatch.setattr(
        judge, "language", lambda name: type(LANGUAGES[name])(**{**LANGUAGES[name].__dict__, "screen": lambda source: None})
    )
    identity = Problem("same", "def reference(x):\n    return (x,)\n", PROBLEM.inputs, PROBLEM.outputs)
    verdict = evaluator.evaluate(identity, Candidate("torch", "def run(x):\n    return x\n"), SIZES)
    assert verdict.status is Status.OUTPUT_ALIASED


def test_a_reference_that_fails_is_not_the_candidates_fault(evaluator: Evaluator) -> None:
    bad = Problem("bad", "def reference(x):\n    raise ValueError('no such thing')\n", PROBLEM.inputs, PROBLEM.outputs)
    verdict = cpp(SCALE_CPP, evaluator, bad)
    assert verdict.status is Status.INFRASTRUCTURE
    assert "no such thing" in verdict.message


def test_looser_tolerances_are_the_problems_to_state(evaluator: Evaluator) -> None:
    loose = scale_problem(tolerance=Tolerance(fp64_factor=None))
    assert cpp(SCALE_CPP.replace("* 2 + 1", "* 2.002f + 1"), evaluator, loose).status is Status.PASSED


def test_a_against_a_reads_one(evaluator: Evaluator) -> None:
    """The same kernel under two names: within five percent on a CPU, whichever comes first."""
    site = card_problems(batch=8)["ffn_gate_up"]
    source = bundle.read(kernels_dir() / "ffn_gate_up" / "cpu.cpp")
    kernel = Candidate("cpp", source, tuple(families()["ffn_gate_up"].space["cpp"](site.problem.spec, 8)[0].items()))
    one, two = (evaluator.evaluate(site.problem, kernel, site.sizes) for _ in range(2))
    assert one.latency is not None
    assert two.latency is not None
    ratios = [stats.median(v.latency.eager) / stats.median(v.latency.candidate) for v in (one, two)]  # type: ignore[union-attr]
    assert abs(ratios[0] / ratios[1] - 1) < 0.15


def test_rank_puts_the_faster_first_and_failures_last(evaluator: Evaluator) -> None:
    slow = SCALE_CPP.replace(BODY, "for (volatile int i = 0; i < 3000000; i++);\n  " + BODY)
    ranked = evaluator.rank(PROBLEM, [Candidate("cpp", s) for s in (slow, "nonsense", SCALE_CPP)], SIZES, time.monotonic() + 60)
    assert [c.source for c, _, _ in ranked] == [SCALE_CPP, slow, "nonsense"]
    assert ranked[0][1] < ranked[1][1] < ranked[2][1] == float("inf")
    assert "jasperk_run" in ranked[2][2]


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import jasperk_inductor.evaluate.sandbox as sandbox

    monkeypatch.setattr(sandbox, "scratch", lambda prefix: _made(tmp_path, prefix))
    monkeypatch.setattr(judge, "scratch", lambda prefix: _made(tmp_path, prefix))
    monkeypatch.setattr(judge, "CALL_S", 1.0)
    files = len(os.listdir("/proc/self/fd"))
    children = set(psutil.Process().children(recursive=True))
    with Evaluator("cpu") as one:
        for source in (broken("for (volatile int i = 0;; i++);"), broken("__builtin_trap();"), "nonsense"):
            cpp(source, one)
        evaluation = one.rank(PROBLEM, [Candidate("cpp", SCALE_CPP)], SIZES, time.monotonic() + 30)
        assert evaluation[0][1] < float("inf")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and set(psutil.Process().children(recursive=True)) - children:
        time.sleep(0.05)
    assert not set(psutil.Process().children(recursive=True)) - children
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= files + 1


def _made(base: Path, prefix: str) -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))


def test_workers_die_with_the_judge() -> None:
    import subprocess
    import sys

    code = (
        "import os\nfrom jasperk_inductor.evaluate.sandbox import Handle, Zygote\n"
        "h = Handle(Zygote(), 'cpu', 1, 1 << 20, 1 << 34)\nprint(h.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).resolve().parent.parent.parent
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    pid = int(out.stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_a_dead_zygote_is_replaced() -> None:
    zygote = Zygote()
    first = Handle(zygote, "cpu", 1, 1 << 20, 1 << 34)
    assert zygote._process is not None
    zygote._process.kill()
    zygote._process.wait()
    first.close()
    second = Handle(zygote, "cpu", 1, 1 << 20, 1 << 34)
    assert second.call("unload", 10.0, name="nothing") == {}
    second.close()
    zygote.close()


def test_a_candidate_sees_a_scrubbed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    zygote = Zygote()
    worker = Handle(zygote, "cpu", 1, 1 << 20, 1 << 34)
    try:
        environment = Path(f"/proc/{worker.pid}/environ").read_bytes()  # what it was started with: the zygote's
        worker.call("unload", 10.0, name="x")
        assert worker.alive
        probe = "import os\ndef run(x):\n    raise RuntimeError(sorted(os.environ))\n"
        built = worker.folder / "built"
        built.mkdir()
        (built / "kernel.py").write_text(probe)
        from jasperk_inductor.contract import to_json
        from jasperk_inductor.evaluate import wire
        from jasperk_inductor.evaluate.sandbox import Failed

        candidate = Candidate("torch", probe)
        worker.call("load", 30.0, name="c", kind="candidate", spec=to_json(PROBLEM.spec), candidate=to_json(candidate), folder=str(built))
        wire.write_tensors(worker.folder / "in", {"x": torch.ones(1, 64)})
        with pytest.raises(Failed) as failed:
            worker.call("run", 30.0, name="c", inputs=str(worker.folder / "in"), outputs=str(worker.folder / "out"))
        assert "MY_TOKEN" not in str(failed.value)
        assert "HOME" in str(failed.value)
        assert environment is not None
    finally:
        worker.close()
        zygote.close()
