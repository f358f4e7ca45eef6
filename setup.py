"""Maps the fixed top-level folders to import packages, and lets CMake build the C++ and CUDA kernels ahead of time.

`kernels` must never become importable under that name: transformers imports Hugging Face's package `kernels`, and ours would take
its place. So the folders have no `__init__.py` and are mapped to `jasperk_kernels`, `jasperk_models` and `jasperk_bench`.

Building ahead is a convenience. Without CMake or a compiler the same sources are built when they are first used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
MAPPED = {"jasperk_kernels": "kernels", "jasperk_models": "models", "jasperk_bench": "bench_e2e"}


def packages() -> tuple[list[str], dict[str, str]]:
    found, folders = [], dict(MAPPED)
    for path in sorted((ROOT / "jasperk_inductor").rglob("__init__.py")):
        found.append(".".join(path.parent.relative_to(ROOT).parts))
    for package, folder in MAPPED.items():
        found.append(package)
        for path in sorted(p for p in (ROOT / folder).rglob("*") if p.is_dir() and p.name not in ("__pycache__", "results")):
            found.append(".".join([package, *path.relative_to(ROOT / folder).parts]))
    return found, folders


class BuildWithKernels(build_py):
    """`build_py`, and before it CMake where JASPERK_PREBUILD=1 asks for it."""

    def run(self) -> None:
        if os.environ.get("JASPERK_PREBUILD") == "1":
            self.prebuild()
        super().run()

    def prebuild(self) -> None:
        if shutil.which("cmake") is None:
            print("jasperk: no cmake; kernels will be built when first used", file=sys.stderr)
            return
        build = ROOT / "build" / "kernels"
        steps = [
            ["cmake", "-S", str(ROOT), "-B", str(build), f"-DPython3_EXECUTABLE={sys.executable}"],
            ["cmake", "--build", str(build), "--parallel"],
        ]
        for step in steps:
            if subprocess.run(step, check=False).returncode != 0:
                print("jasperk: CMake failed; kernels will be built when first used", file=sys.stderr)
                return


names, folders = packages()
setup(
    packages=names,
    package_dir=folders,
    package_data={
        "jasperk_inductor": ["_prebuilt/*", "optimize/prompts/*.md", "rl/*.md"],
        **{name: ["*.cpp", "*.cu", "*.h", "*.cuh", "*.json", "*.md", "*.sh"] for name in names if name.split(".")[0] in MAPPED},
    },
    cmdclass={"build_py": BuildWithKernels},
)
