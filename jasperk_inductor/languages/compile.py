"""Runs a compiler in a clean folder, with a time limit, and shortens what it says. Shared by C++ and CUDA C++.

Binaries are looked up first among those that CMake built ahead of time; the same text and flags give the same file name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from ..contract import Status
from ..errors import MissingTool
from .base import BuildFailed

LIBRARY = "kernel.so"
PREBUILT = Path(__file__).resolve().parent.parent / "_prebuilt"

builds = 0  # compiler runs in this process; tests and `jasperk cache` read it


def find_tool(setting: str, *names: str) -> str | None:
    """The tool that an environment variable names (and no other), or the first of these names that is there."""
    wanted = [os.environ[setting]] if os.environ.get(setting) else names
    return next((path for name in wanted if (path := shutil.which(name))), None)


def fingerprint(text: str, flags: list[str]) -> str:
    return hashlib.sha256("\0".join([text, *flags]).encode()).hexdigest()[:24]


def compile_library(compiler: str | None, flags: list[str], text: str, suffix: str, folder: Path, timeout: float, tool: str) -> None:
    """Compiles `text` to folder/kernel.so, or copies the prebuilt one.

    Raises:
        BuildFailed: the compiler says no, or takes longer than `timeout` seconds.
        MissingTool: there is no compiler and no prebuilt binary.
    """
    global builds
    source = folder / f"kernel{suffix}"
    source.write_text(text)
    ready = PREBUILT / f"{fingerprint(text, flags)}.so"
    if ready.exists():
        shutil.copyfile(ready, folder / LIBRARY)
        return
    if compiler is None:
        raise MissingTool(tool)
    builds += 1
    command = [compiler, *flags, "-shared", "-o", LIBRARY, source.name]
    environment = {k: os.environ[k] for k in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "CUDA_HOME") if k in os.environ}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise BuildFailed(f"the compiler took longer than {timeout:.0f} s", Status.BUILD_TIMEOUT) from None
    if process.returncode != 0:
        raise BuildFailed(_shorten(said.decode(errors="replace")))


def _shorten(said: str, most: int = 4000) -> str:
    lines = [line for line in said.splitlines() if "error" in line.lower() or "note:" not in line]
    text = "\n".join(lines)
    return text if len(text) <= most else text[:most] + f"\n… ({len(text) - most} characters more)"
