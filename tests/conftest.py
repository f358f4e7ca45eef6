"""Fixtures shared by all tests. Everything a test writes goes to a folder of its own; nothing reads the user's cache."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["JASPERK_CACHE_DIR"] = "/nonexistent/jasperk-tests-name-their-cache"

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from jasperk_inductor import explanation, planner, swap
from jasperk_inductor.evaluate import Evaluator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Each test starts with no compiled code, no reports and no counts."""
    torch._dynamo.reset()
    explanation.forget()
    swap.fallbacks.clear()
    planner._said.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator("cpu") as one:
        yield one
