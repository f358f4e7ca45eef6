"""The command `jasperk`: one subcommand a stage.

With --json every command writes one JSON object a line to stdout and nothing else there; tables, progress and logs go to stderr.
"""

from __future__ import annotations

import logging
import sys

import typer
from rich.logging import RichHandler

from .. import __version__
from ..errors import JasperkError
from ..settings import ENVIRONMENT, log_level
from . import lab, model, store
from .common import err

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Verified kernels for torch.compile. Start with [bold]jasperk demo[/bold], or see what a model holds with "
    "[bold]jasperk trace --model qwen3_8[/bold].",
    epilog="Environment: " + "; ".join(f"{k}: {v}" for k, v in ENVIRONMENT.items()),
)  # fmt: skip
for command in (model.trace, lab.optimize, lab.evaluate, model.explain, model.bench, model.demo, model.figures):
    app.command()(command)
app.add_typer(store.app, name="cache")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Runs the command; an error of ours is one clear line, not a traceback."""
    logger = logging.getLogger("jasperk")
    logger.addHandler(RichHandler(console=err, show_path=False, show_time=False))
    logger.setLevel(log_level() or "WARNING")
    try:
        app()
    except JasperkError as error:
        err.print(f"[red]error:[/red] {error}", highlight=False)
        sys.exit(1)
