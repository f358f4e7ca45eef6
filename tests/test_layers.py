"""Imports go one way. Reads every import, in functions too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module may import modules of its own rank (where it says so) and of lower ranks.
RANKS = [
    {"errors"},
    {"settings"},
    {"contract"},
    {"folders", "stats", "graph", "reference"},
    {"device", "patterns", "languages"},
    {"kernels", "models_folder"},
    {"families", "models"},
    {"trace", "cache", "evaluate", "explanation"},
    {"optimize", "swap", "bundle"},
    {"planner", "suites", "rl"},
    {"backend"},
    {"api"},
    {"bench"},
    {"cli"},
]
# In functions only: the lab is loaded when a kernel is missing; a build-time listing traces model cards.
ALLOWED = {("languages", "api"), ("languages", "families"), ("languages", "models"), ("cli", "bench")}


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "kernels":
        return "kernels"
    if parts[0] == "models":
        return "models_folder"
    if parts[0] == "bench_e2e":
        return "bench"
    return parts[1].removesuffix(".py")


def imported(path: Path) -> set[str]:
    found = set()
    tree = ast.parse(path.read_text())
    for node in tree.body:  # what only a type checker sees is no import
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = ["jasperk_inductor", *path.relative_to(ROOT).parts[1:-1]]
                base = base[: len(base) - node.level + 1]
                if path.relative_to(ROOT).parts[0] == "bench_e2e":
                    base = ["jasperk_bench"]
                stem = ".".join([*base, node.module] if node.module else base)
                names = [stem] if node.module else [f"{stem}.{a.name}" for a in node.names]
            else:
                module = node.module or ""
                names = [f"{module}.{a.name}" for a in node.names] if module == "jasperk_inductor" else [module]
        for name in names:
            top, *rest = name.split(".")
            if top == "jasperk_inductor" and rest:
                found.add(rest[0])
            elif top == "jasperk_kernels":
                found.add("kernels")
            elif top == "jasperk_bench":
                found.add("bench")
    return found


def modules() -> list[Path]:
    return [p for folder in ("jasperk_inductor", "kernels", "models", "bench_e2e") for p in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    rank = {name: i for i, names in enumerate(RANKS) for name in names}
    here = room(path)
    if here == "__init__":
        return
    for other in imported(path) - {here}:
        if other in ("__version__",) or (here, other) in ALLOWED:
            continue
        assert other in rank, f"{other} has no rank; give it one in RANKS"
        assert rank[other] < rank[here], f"{path.relative_to(ROOT)} imports {other}, which does not lie below {here}"


def test_evaluate_never_imports_the_optimizer_or_rl() -> None:
    for path in (ROOT / "jasperk_inductor" / "evaluate").glob("*.py"):
        assert not imported(path) & {"optimize", "rl", "swap", "backend", "planner"}


def test_every_room_is_ranked() -> None:
    ranked = set().union(*RANKS) | {"__init__"}
    assert {room(p) for p in modules()} <= ranked


def test_importing_the_backend_loads_no_lab_module() -> None:
    code = "import sys, jasperk_inductor.backend\nprint([m for m in sys.modules if m.startswith(('jasperk_inductor.evaluate','jasperk_inductor.optimize'))])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names() -> None:
    import jasperk_inductor

    assert sorted(jasperk_inductor.__all__) == ["Cache", "Candidate", "Evaluator", "Problem", "Verdict", "explain", "sites"]
    for name in jasperk_inductor.__all__:
        assert getattr(jasperk_inductor, name) is not None
    with pytest.raises(AttributeError):
        _ = jasperk_inductor.nothing_of_the_kind


def test_kernels_is_not_importable_under_that_name() -> None:
    for folder in ("kernels", "models", "bench_e2e"):
        assert not list((ROOT / folder).rglob("__init__.py"))
