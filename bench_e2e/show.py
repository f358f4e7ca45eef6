"""The ledger for people: a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from .ledger import Row


def table(rows: Sequence[Row], title: str) -> Table:
    """One line a row; a void row says why, and its figures are struck out."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for name in (
        "",
        "ms/step",
        "tokens/s",
        "over Inductor",
        "over the row before",
        "predicted",
        "tokens",
        "logit error",
        "memory",
        "swapped",
    ):
        made.add_column(name, no_wrap=name not in ("", "swapped"), justify="left" if name in ("", "swapped") else "right")
    for row in rows:
        swapped = " ".join(f"{k}{v}" for k, v in row.swapped.items())
        kept = f" kept: {' '.join(row.kept)}" if row.kept else ""
        made.add_row(
            row.config, f"{row.ms_per_step:.3f}", f"{row.tokens_per_s:.1f}", _ratio(row.vs_inductor, row.vs_inductor_interval),
            _ratio(row.vs_previous, row.vs_previous_interval),
            f"{row.predicted_vs_previous:.2f}x" if row.predicted_vs_previous else "",
            "equal" if row.tokens_equal else f"{row.tokens_agree:.1%}", f"{row.logit_error:.2e}", f"{row.peak_memory_gb:.1f} GB",
            f"VOID: {row.void}" if not row.valid else f"{swapped}{kept}" + ("" if row.correct else "  NOT CORRECT"),
            style="strike red" if not row.valid else "" if row.correct else "red",
        )  # fmt: skip
    return made


def _ratio(value: float | None, interval: tuple[float, float] | None) -> str:
    return f"{value:.2f}x [{interval[0]:.2f}, {interval[1]:.2f}]" if value is not None and interval is not None else ""


def plot(curves: Mapping[str, Sequence[Row]], folder: Path, title: str) -> list[Path]:
    """Tokens/s row by row, one curve a kernel cache; written as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for number, (label, rows) in enumerate(curves.items()):
        good = [r for r in rows if r.valid]
        ladder = [r for r in good if r.config not in ("eager", "inductor", "jasperk")]
        shown = [r for r in good if r.config in ("eager", "inductor")] + ladder + [r for r in good if r.config == "jasperk"]
        names = [r.config for r in shown]
        line = axes.plot(names, [r.tokens_per_s for r in shown], marker="o", label=label)[0]
        low = [min(r.tokens_per_s, r.batch / max(r.samples_ms) * 1e3) for r in shown]
        axes.fill_between(names, low, [r.tokens_per_s for r in shown], alpha=0.12, color=line.get_color(), linewidth=0)
        rival = next((r for r in good if r.config == "inductor"), None)
        if rival is not None and number == 0:
            axes.axhline(rival.tokens_per_s, linestyle="--", linewidth=1, color="grey")
            axes.annotate("Inductor", (0, rival.tokens_per_s), xytext=(4, 4), textcoords="offset points", color="grey", fontsize=8)
    axes.set_ylabel("tokens/s")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    if len(curves) > 1:
        axes.legend(frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "ledger.png", folder / "ledger.svg"]
    for path in paths:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return paths
