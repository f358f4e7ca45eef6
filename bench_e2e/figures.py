"""Recomputes every figure of the README from the raw samples in `results/`, and writes them into it.

    jasperk figures            # rewrite the tables
    jasperk figures --check    # fail if a figure in the README is not what the samples say

A table stands in the README between `<!-- figures FILE -->` and `<!-- end -->`; FILE is one of `results/`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jasperk_inductor import stats
from jasperk_inductor.errors import JasperkError

RESULTS = Path(__file__).resolve().parent / "results"
_BLOCK = re.compile(r"(<!-- figures (\S+) -->\n).*?(<!-- end -->)", re.S)


def rewritten(text: str, results: Path = RESULTS) -> str:
    """The README's text with each table computed anew.

    Raises:
        JasperkError: a table names a file that is not there, or a record contradicts its own samples.
    """

    def table(found: re.Match[str]) -> str:
        path = results / found[2]
        try:
            records = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise JasperkError(f"{path} cannot be read ({error}); measure it again with `jasperk bench --out …`.") from error
        return f"{found[1]}{markdown(records)}{found[3]}"

    return _BLOCK.sub(table, text)


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """One line a row, computed from its samples."""
    lines = [
        "| layers | batch | row | ms a step | tokens/s | over Inductor | over the row before | swapped | greedy tokens | logit error, rms |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for r in records:
        ms = stats.median(r["samples_ms"])
        for key, value in (("ms_per_step", ms), ("tokens_per_s", r["batch"] / ms * 1e3)):
            if not math.isclose(r[key], value, rel_tol=1e-3):
                raise JasperkError(f"row {r['config']} records {key} {r[key]}, but its samples give {value}.")
        inductor = stats.ratio(r["inductor_samples_ms"], r["samples_ms"]) if r["config"] != "inductor" else ""
        before = stats.ratio(r["previous_samples_ms"], r["samples_ms"]) if r["config"] not in ("eager", "inductor") else ""
        letters = " ".join(f"{k}{v}" for k, v in r["swapped"].items())
        share = r["logit_rms"] / r["inductor_logit_rms"] if r["inductor_logit_rms"] else 1.0
        error = f"{r['logit_rms']:.3g} ({share:.2f}x Inductor's)"
        name = r["config"] if r["valid"] else f"~~{r['config']}~~ void: {r['void']}"
        lines.append(
            f"| {r['layers']} | {r['batch']} | {name} | {ms:.3f} | {r['batch'] / ms * 1e3:.0f} | {inductor} | {before} | {letters} "
            f"| {'equal' if r['tokens_equal'] else format(r['tokens_agree'], '.1%')} | {error} |"
        )
    one = records[0]
    where = f"{one['gpu'] or one['device']}, torch {one['torch']}" + (f", Triton {one['triton']}" if one["gpu"] else "")
    commits = ", ".join(sorted({f"`{r['commit']}`" for r in records}))
    dates = ", ".join(sorted({r["date"][:10] for r in records}))
    lines.append(f"\n{where}; {one['dtype']}, mode `{one['mode']}`; commit {commits}; {dates}.")
    return "\n".join(lines) + "\n"
