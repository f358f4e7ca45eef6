"""The commands as a user types them: JSON lines on stdout, everything else on stderr, errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import whole_model_on_a_cpu
from typer.testing import CliRunner

import jasperk_inductor
from jasperk_inductor import api, backend, explanation
from jasperk_inductor.cache import Cache
from jasperk_inductor.cli import app
from jasperk_inductor.errors import BadBundle, JasperkError, UnknownName
from jasperk_inductor.families import kernels_dir
from jasperk_inductor.languages import bundle
from jasperk_inductor.languages import compile as compiling

ROOT = Path(__file__).resolve().parent.parent
COUNTS = {"A": 4, "B": 4, "C": 3, "D": 4, "E": 1, "F": 8, "G": 4, "H": 3, "I": 1}
QUICK = ["-f", "G", "-f", "gated_rmsnorm", "-f", "I"]  # families whose kernels are judged in a few seconds


def call(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def lines(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """What a command with --json prints: stdout holds JSON objects and nothing else."""
    return [json.loads(line) for line in call(*arguments, "--json", code=code).stdout.splitlines()]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    torch._dynamo.reset()
    cache = tmp_path_factory.mktemp("cli") / "cache"
    return cache, lines("optimize", "--batch", "2", *QUICK, "--cache-dir", str(cache), "--device", "cpu")


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_trace_lists_every_site(phase: str) -> None:
    rows = lines("trace", "--model", "qwen3_8", "--size", "tiny", "--phase", phase)
    assert Counter(r["letter"] for r in rows) == COUNTS
    assert {r["status"] for r in rows} == {"site"}
    assert all({"family", "letter", "module", "status", "rows", "problem"} <= set(r) for r in rows)
    assert {"model.layers.0.mlp.down_proj", "model.layers.3.self_attn"} <= {r["module"] for r in rows}
    assert len([r for r in rows if r["module"] == "model.layers.1.input_layernorm"]) == 1


def test_trace_several_batches_and_for_people() -> None:
    assert {r["batch"] for r in lines("trace", "-b", "1", "-b", "4")} == {1, 4}
    shown = call("trace").stdout
    assert "Qwen3.8-27B (tiny), decode" in shown
    assert "residual_rmsnorm" in shown


def test_trace_at_full_size_needs_no_memory() -> None:
    rows = lines("trace", "--size", "full", "--dtype", "bfloat16")
    assert Counter(r["letter"] for r in rows) == {"A": 64, "B": 64, "C": 48, "D": 64, "E": 16, "F": 128, "G": 64, "H": 48, "I": 16}


def test_optimize_fills_the_cache_once(filled: tuple[Path, list[dict[str, Any]]]) -> None:
    cache, rows = filled
    assert sorted(r["letter"] for r in rows if r["status"] == "passed") == ["G", "H", "I"]
    for row in rows:
        assert row["rows"] >= 2
        assert row["ms"] > 0
        assert row["over_eager"]["low"] <= row["over_eager"]["value"] <= row["over_eager"]["high"]
    again = lines("optimize", "--batch", "2", *QUICK, "--cache-dir", str(cache))
    assert [r["kernel"] for r in again] == [r["kernel"] for r in rows]
    assert all(r["ms"] == s["ms"] for r, s in zip(again, rows, strict=True)), "the very entries, not measured again"
    assert "0 evaluations" in call("optimize", "--batch", "2", *QUICK, "--cache-dir", str(cache)).stdout


def test_explain_and_list_as_the_cache_stands(filled: tuple[Path, list[dict[str, Any]]]) -> None:
    cache = str(filled[0])
    rows = lines("explain", "--batch", "2", "--beat", "eager", "--cache-dir", cache)
    assert Counter(r["letter"] for r in rows) == COUNTS
    assert {r["letter"] for r in rows if r["status"] == "swapped"} <= set("GHI")
    for row in rows:
        assert row["gain"] > 1 and row["roofline"] > 0 if row["status"] == "swapped" else row["reason"]
    listed = lines("cache", "list", "--cache-dir", cache)
    assert {r["family"] for r in listed} == {"silu_mul", "gated_rmsnorm", "qk_norm_rope"}
    assert all(r["usable"] for r in listed)
    assert "of 32 sites swapped" in call("explain", "--batch", "2", "--cache-dir", cache).stdout


@whole_model_on_a_cpu
def test_offline_the_packed_cache_needs_no_compiler(
    filled: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, other = tmp_path / "kernels.tgz", tmp_path / "elsewhere" / "cache"
    (packed,) = lines("cache", "pack", str(bundle), "--cache-dir", str(filled[0]))
    assert packed["packed"] == 3
    monkeypatch.setenv("JASPERK_CXX", "/nonexistent/g++")
    rows = lines("cache", "unpack", str(bundle), "--cache-dir", str(other))
    assert [r["usable"] for r in rows] == [True] * 3
    before = compiling.builds
    work = api.Workload("qwen3_8", "tiny", batch=2)
    options = {"cache_dir": str(other), "beat": "eager", "families": ["silu_mul", "gated_rmsnorm", "qk_norm_rope"]}
    session = work.session("cpu")
    arguments = work.arguments(session)
    with torch.no_grad():
        session.mark()
        wanted = session.model(**arguments).logits
        session.rewind()
        got = torch.compile(session.model, backend=lambda gm, x: backend.jasperk(gm, x, options=options))(**arguments).logits
    assert torch.allclose(got, wanted, atol=1e-4)
    (report,) = explanation.reports()
    assert report.failure is None
    assert report.evaluations == 0
    assert compiling.builds == before
    outcomes = jasperk_inductor.explain().outcomes
    mine = [o for o in outcomes if o.family in options["families"]]
    assert mine
    assert all(o.status == "swapped" or "against eager" in o.reason for o in mine), mine


def test_an_entry_for_another_machine_is_named_with_its_reason(
    filled: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jasperk_inductor import device as devices

    bundle = tmp_path / "kernels.tgz"
    call("cache", "pack", str(bundle), "--cache-dir", str(filled[0]))
    monkeypatch.setattr(devices, "name", lambda device: "another processor")
    rows = lines("cache", "unpack", str(bundle), "--cache-dir", str(tmp_path / "cache"), "--device", "cpu")
    assert all(not r["usable"] and "'another processor'" in r["reason"] for r in rows)
    listed = lines("cache", "list", "--cache-dir", str(tmp_path / "cache"), "--device", "cpu")
    assert all("another processor" in r["reason"] for r in listed)


def test_evaluate_judges_a_file(tmp_path: Path) -> None:
    (shown,) = lines("evaluate", "--problem", "qwen3_8:G", "--show", "--batch", "2")
    assert "silu" in shown["problem"]["reference"]
    task = tmp_path / "task.json"
    task.write_text(json.dumps(shown))
    kernel = kernels_dir() / "silu_mul" / "cpu.cpp"
    (good,) = lines("evaluate", str(kernel), "--problem", str(task))
    assert good["verdict"]["status"] == "passed"
    wrong = tmp_path / "wrong.cpp"
    text = bundle.read(kernel)
    assert "simd::silu(get(g + k, n))" in text
    wrong.write_text(text.replace("simd::silu(get(g + k, n))", "get(g + k, n)"))
    (bad,) = lines("evaluate", str(wrong), "--problem", "qwen3_8:silu_mul", "--batch", "2", code=1)
    assert bad["verdict"]["status"] == "mismatch", bad
    text = call("evaluate", str(wrong), "--problem", str(task), code=1).stdout
    assert "mismatch" in text


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["trace", "--model", "qwen3_9"], UnknownName, "'qwen3_8'"),
        (["trace", "--size", "tinny"], UnknownName, "'tiny'"),
        (["trace", "--phase", "decoding"], JasperkError, "prefill or decode"),
        (["trace", "--dtype", "float31"], JasperkError, "float32, bfloat16"),
        (["optimize", "-f", "Z"], UnknownName, "no family 'Z'"),
        (["optimize", "--optimizer", "libary"], UnknownName, "'library'"),
        (["explain", "--device", "tpu9"], JasperkError, "use cpu, cuda"),
        (["evaluate", "--problem", "qwen3_8"], JasperkError, "MODEL:FAMILY"),
        (["evaluate", "nothing.cpp"], JasperkError, "there is no file nothing.cpp"),
        (["evaluate", "kernel.f90"], JasperkError, "suffix"),
        (["bench", "--rows", "+Q", "--batch", "1"], JasperkError, "rows are eager"),
        (["bench", "--weights", "/nonexistent"], JasperkError, "config.json"),
        (["cache", "unpack", "/nonexistent.tgz"], BadBundle, "no file"),
    ],
)
def test_errors_say_what_to_do(arguments: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(*arguments)


@whole_model_on_a_cpu
def test_bench_writes_json_lines_and_files(filled: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    cache = filled[0]
    rows = lines(
        "bench", "--batch", "2", "--context", "8", "--capacity", "64", "--steps", "8", "--rows", "eager,inductor,jasperk",
        "--cache", str(cache), "--cache", str(tmp_path / "empty"), "--out", str(tmp_path / "out"), "--device", "cpu",
    )  # fmt: skip
    assert [r["config"] for r in rows] == ["eager", "inductor", "jasperk"] * 2
    assert [r["cache"] for r in rows] == ["cache"] * 3 + ["empty"] * 3
    required = "config batch ms_per_step tokens_per_s vs_inductor valid layers gpu gpu_uuid torch triton command samples_ms commit date"
    assert all(set(required.split()) <= set(r) for r in rows)
    assert all(r["valid"] and r["tokens_equal"] and r["correct"] for r in rows)
    assert json.loads((tmp_path / "out" / "ledger.json").read_text()) == rows
    svg = (tmp_path / "out" / "ledger.svg").read_text()
    assert "batch 2, cache" in svg
    assert "batch 2, empty" in svg
    assert set(rows[5]["kept"]) == set(COUNTS)


def terminal(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jasperk_inductor.cli", *arguments], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_at_a_terminal_an_error_is_one_line_and_help_is_there(tmp_path: Path) -> None:
    failed = terminal("trace", "--model", "qwen3_9", COLUMNS="200")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.strip().startswith("error: no model card 'qwen3_9'")
    assert "Traceback" not in failed.stderr
    shown = terminal("--help", COLUMNS="120").stdout
    for command in ("trace", "optimize", "evaluate", "cache", "explain", "bench", "demo"):
        assert command in shown


def test_a_damaged_cache_loses_only_what_is_damaged(filled: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "cache"
    shutil.copytree(filled[0], root)
    first = sorted((root / "entries").iterdir())[0]
    first.write_bytes(first.read_bytes()[:50])
    assert len(lines("cache", "list", "--cache-dir", str(root))) == 2
    assert len(list((root / "quarantine").iterdir())) == 1
    assert len(list(Cache(root).entries())) == 2
