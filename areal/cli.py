"""The commands ``archon-run CONFIG [key=value …]`` and ``archon run|check …``.

Nothing heavy is imported before a command runs, so ``--help`` answers at once. Exit codes: 0 done, 2 bad configuration
or usage, 1 anything else.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from areal.config import Config

Recipe = Annotated[Path, typer.Argument(metavar="CONFIG", help="The recipe: a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as gconfig.n_samples=4.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run, with an estimate of memory, and stop.")]


def run(config: Recipe, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Train as the recipe says; the same command resumes an interrupted run."""
    with _exit_codes():
        loaded = _load(config, overrides)
        if dry_run:
            from areal.dry_run import print_dry_run

            print_dry_run(loaded)
            return
        from areal.trainer import Trainer

        print(Trainer(loaded).train().summary, flush=True)


def check(config: Recipe, overrides: Overrides = None) -> None:
    """Check a recipe and print it with every default, ready to be saved as a recipe itself."""
    with _exit_codes():
        from areal.config import resolved_yaml

        print(resolved_yaml(_load(config, overrides)), end="")


run_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
run_app.command()(run)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Reinforcement learning for large language models: train and inspect.",
)
app.command()(run)
app.command()(check)


def run_main() -> None:
    """The console script ``archon-run``."""
    run_app()


def main() -> None:
    """The console script ``archon``."""
    app()


def _load(path: Path, overrides: list[str] | None) -> Config:
    from areal.config import load_config

    # Workflows and rewards of a recipe may live beside the place the command is run from, as with `python -m`.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return load_config(path, overrides or [])


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn what went wrong into a message and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the same command resumes where the last checkpoint is", file=sys.stderr)
        raise typer.Exit(1) from None
    except Exception as error:
        from areal.config import ConfigError
        from areal.datasets import DatasetError
        from areal.models import ModelNotFound
        from areal.rollout.runlock import RunFolderInUse

        if isinstance(error, ConfigError | DatasetError | ModelNotFound | RunFolderInUse):
            print(f"bad configuration\n{error}", file=sys.stderr)
            raise typer.Exit(2) from None
        traceback.print_exc()
        raise typer.Exit(1) from None
