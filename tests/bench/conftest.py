"""The demo, run once on a cold cache: what `make demo` does, at the batch it uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from jasperk_inductor.folders import package

package("jasperk_bench")
from jasperk_bench import run as bench_run  # noqa: E402


@dataclass
class Demo:
    record: dict[str, Any]
    cache: Path
    out: Path
    said: str


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    root = tmp_path_factory.mktemp("demo")
    console = Console(record=True, width=160, quiet=False, file=(root / "said.txt").open("w"))
    record = bench_run.demo("qwen3_8", 8, root / "cache", root / "out", console, Progress(disable=True))
    return Demo(record, root / "cache", root / "out", console.export_text())
