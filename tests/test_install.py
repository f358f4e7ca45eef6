"""Installed as a wheel it works from elsewhere, and what CMake built ahead of time is what the run-time builder would build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jasperk_inductor.errors import UnknownName
from jasperk_inductor.folders import FOLDERS, package

ROOT = Path(__file__).resolve().parent.parent
FILES = ("jasperk_inductor", "kernels", "models", "bench_e2e", "setup.py", "pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that builds leave nothing behind here."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        ignore = shutil.ignore_patterns("__pycache__", "_prebuilt", "*.egg-info")
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name, **({"ignore": ignore} if (ROOT / name).is_dir() else {}))  # type: ignore[operator]  # fmt: skip
    return copy


def test_a_wheel_works_from_elsewhere(checkout: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(checkout)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("jasperk-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True, capture_output=True)
    for file in (
        "jasperk_kernels/ffn_down/kernel.cu",
        "jasperk_kernels/shared/simd.h",
        "jasperk_models/qwen3_8.py",
        "jasperk_bench/run.py",
    ):
        assert (site / file).exists(), file
    assert (site / "jasperk_kernels/ffn_down/tuned/nvidia-h200.json").exists()
    entry_points = next(site.glob("jasperk-*.dist-info")) / "entry_points.txt"
    assert "[torch_dynamo_backends]\njasperk = jasperk_inductor.backend:jasperk" in entry_points.read_text()
    code = (
        "import sys, runpy, jasperk_inductor; print(jasperk_inductor.__file__, file=sys.stderr); "
        "sys.argv = ['jasperk', 'trace', '--json']; runpy.run_module('jasperk_inductor.cli', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, check=True
    )
    assert str(site) in done.stderr, "the installed one ran, not the checkout"
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 32
    import importlib.util

    assert importlib.util.find_spec("kernels") is None or "jasperk" not in str(importlib.util.find_spec("kernels"))


USE = """
import json
from pathlib import Path
from jasperk_inductor import api
from jasperk_inductor.contract import Candidate
from jasperk_inductor.families import family, kernels_dir
from jasperk_inductor.languages import LANGUAGES, bundle, compile
import tempfile
built = []
for site in api.distinct(api.Workload("qwen3_8", "tiny", batch=4).sites()):
    spec = site.problem.spec
    params = family(site.family).space["cpp"](spec, site.rows)[0]
    candidate = Candidate("cpp", bundle.read(kernels_dir() / site.family / "cpu.cpp"), tuple(params.items()))
    LANGUAGES["cpp"].build(candidate, spec, Path(tempfile.mkdtemp()), 60.0)
    built.append(site.family)
print(json.dumps({"built": built, "compiler_runs": compile.builds}))
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_cmake_builds_what_the_run_time_would_build(checkout: Path) -> None:
    environment = {**os.environ, "JASPERK_NVCC": "/nonexistent/nvcc", "PYTHONPATH": str(checkout)}  # nvcc would take minutes
    build = checkout / "build" / "kernels"
    for command in (
        ["cmake", "-S", str(checkout), "-B", str(build), f"-DPython3_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", str(build), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    libraries = list((checkout / "jasperk_inductor" / "_prebuilt").glob("*.so"))
    assert len(libraries) == 20, "ten problems in two types"
    used = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, cwd=checkout, env=environment, check=True)
    said = json.loads(used.stdout.splitlines()[-1])
    assert len(said["built"]) == 10
    assert said["compiler_runs"] == 0, "every one was there already"


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_the_fixed_folders_are_importable(name: str) -> None:
    assert any(package(name).iterdir())


def test_a_folder_that_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FOLDERS, "jasperk_nothing", "nothing")
    with pytest.raises(UnknownName, match="pip install -e"):
        package("jasperk_nothing")


def test_the_readmes_figures_are_what_the_samples_say(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from jasperk_inductor.cli import app
    from jasperk_inductor.errors import JasperkError

    runner = CliRunner()
    assert runner.invoke(app, ["figures", str(ROOT / "README.md"), "--check"]).exception is None
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- figures ") >= 1
    changed = tmp_path / "README.md"
    changed.write_text(text.replace("x [", "9x [", 1))
    result = runner.invoke(app, ["figures", str(changed), "--check"])
    assert isinstance(result.exception, JasperkError)
    assert runner.invoke(app, ["figures", str(changed)]).exit_code == 0
    assert changed.read_text() == text


def test_a_record_that_contradicts_its_samples_is_refused() -> None:
    package("jasperk_bench")
    from jasperk_bench import figures

    from jasperk_inductor.errors import JasperkError

    records = json.loads((ROOT / "bench_e2e/results/h200-qwen3_8.json").read_text())
    assert "x Inductor's" in figures.markdown(records)
    records[1]["ms_per_step"] *= 0.9
    with pytest.raises(JasperkError, match="its samples give"):
        figures.markdown(records)
