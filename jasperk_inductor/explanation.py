"""What became of every site, in this process.

The backend plans each graph anew, also when torch's caches hit and no pass runs, and leaves a `GraphReport` here. `Explanation`
is what a person or a program reads.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .contract import Kept, Outcome, Swapped


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph.

    Attributes:
        number: counted up over the process.
        outcomes: every site, in graph order.
        failure: why our part failed and the pristine graph was compiled, if it did.
        evaluations: candidates evaluated during this compile; 0 when everything came from the cache.
        seconds: that our part of the compile took.
    """

    number: int
    outcomes: tuple[Outcome, ...] = ()
    failure: str | None = None
    evaluations: int = 0
    seconds: float = 0.0
    dynamic: bool = False
    operators: tuple[str, ...] = ()


_reports: list[GraphReport] = []


def record(report: GraphReport) -> None:
    _reports.append(report)


def reports() -> list[GraphReport]:
    """Every graph that the backend has compiled in this process."""
    return list(_reports)


def forget() -> None:
    """Starts a new list of reports."""
    _reports.clear()


@dataclass(frozen=True)
class Explanation:
    """Every site of some graphs: swapped for which kernel, or kept and why. `print` shows a table."""

    graphs: tuple[GraphReport, ...] = ()
    letters: dict[str, str] = field(default_factory=dict)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(o for g in self.graphs for o in g.outcomes)

    @property
    def swapped(self) -> tuple[Swapped, ...]:
        return tuple(o for o in self.outcomes if isinstance(o, Swapped))

    @property
    def kept(self) -> tuple[Kept, ...]:
        return tuple(o for o in self.outcomes if isinstance(o, Kept))

    def counts(self) -> dict[str, int]:
        """Swapped sites by family."""
        return dict(collections.Counter(o.family for o in self.swapped))

    def rows(self) -> list[dict[str, Any]]:
        """One plain dict a site."""
        return [
            {"graph": g.number, "family": o.family, "letter": self.letters.get(o.family), "status": o.status, **asdict(o)}
            for g in self.graphs
            for o in g.outcomes
        ]

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=150, record=True, file=io.StringIO())
        console.print(self.__rich__())
        return console.export_text()

    def __rich__(self) -> Any:
        return _table(self)


def _table(explanation: Explanation) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for graph in explanation.graphs:
        swapped = sum(isinstance(o, Swapped) for o in graph.outcomes)
        title = f"graph {graph.number}{' (dynamic)' if graph.dynamic else ''}: {swapped} of {len(graph.outcomes)} sites swapped"
        title += f", {graph.evaluations} evaluations, {graph.seconds:.1f} s"
        if graph.failure:
            parts.append(Text(f"{title}\nkept as it was: {graph.failure}", style="yellow"))
            continue
        if not graph.outcomes:
            parts.append(Text(f"{title}: no known operator family in this graph", style="yellow"))
            continue
        table = Table(title=title, title_justify="left", header_style="bold")
        for name in ("", "family", "sites", "M", "first module", "kernel or reason", "gain", "roofline"):
            table.add_column(name, justify="right" if name in ("sites", "M", "gain", "roofline") else "left", overflow="fold")
        for group in _grouped(graph.outcomes):
            first = group[0]
            letter = explanation.letters.get(first.family, "")
            gain = f"{first.gain:.2f}x" if first.gain is not None else ""
            if isinstance(first, Swapped):
                share = f"{first.roofline:.0%}" if first.roofline is not None else ""
                table.add_row(
                    letter, first.family, str(len(group)), str(first.rows), first.module, first.kernel, gain, share, style="green"
                )
            else:
                table.add_row(letter, first.family, str(len(group)), str(first.rows or ""), first.module, f"kept: {first.reason}", gain, "")
        parts.append(table)
    return Group(*parts) if parts else Text("nothing compiled with backend='jasperk' yet")


def _grouped(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Sites that differ only in their place, together."""
    groups: dict[Any, list[Outcome]] = {}
    for o in outcomes:
        detail = (o.kernel, o.op) if isinstance(o, Swapped) else (o.reason, "")
        groups.setdefault((o.family, o.status, o.rows, *detail), []).append(o)
    return sorted(groups.values(), key=lambda g: g[0].family)
