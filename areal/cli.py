"""The commands ``archon-run CONFIG [key=value …]`` and ``archon run|check|bench …``.

Nothing heavy is imported before a command runs, so ``--help`` answers at once. Exit codes: 0 done, 2 bad configuration
or usage, 1 anything else.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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


def bench(
    layouts: Annotated[
        list[str], typer.Argument(metavar="LAYOUT...", help="Such as d2 or (attn:d1t2|ffn:t1e2).", show_default=False)
    ],
    model: Annotated[Path, typer.Option(help="Model folder; without weights, they are random.", show_default=False)],
    world: Annotated[
        int | None, typer.Option(min=1, help="Processes that all layouts must use; else as many as each has ranks.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 4096,
    sequences: Annotated[int, typer.Option(help="Sequences of a step, of uneven lengths.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps that are measured.")] = 3,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 1,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the computation.")] = "bfloat16",
    max_tokens_per_mb: Annotated[int, typer.Option(help="Token budget of a micro-batch.")] = 8192,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An engine option, such as pp_schedule=1F1B.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds that a layout may take.")] = 600.0,
    json: Annotated[Path | None, typer.Option(metavar="PATH", help="Write the report here.")] = None,
) -> None:
    """Train a few steps in each layout: speed, memory and communication, and how they compare with the first.

    The layouts run one after another in processes of this machine or, under torchrun, in those that it started. One
    that fails is a row with its reason.
    """
    from archon.bench import Workload, launched_world, parse_options
    from areal.layout_bench import run_bench

    try:
        options = parse_options(option or [])
        workload = Workload(str(model), tokens, sequences, steps, warmup, dtype, max_tokens_per_mb, options, deadline)
        if world is not None and launched_world() not in (None, world):
            raise ValueError(f"--world is {world}, but the launcher started {launched_world()} processes: leave it out")
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    if not run_bench(layouts, workload, world, json):
        raise typer.Exit(1)


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
app.command()(bench)


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
        from areal.launch.supervise import TrainingFailed
        from areal.models import ModelNotFound
        from areal.rollout.runlock import RunFolderInUse

        if isinstance(error, TrainingFailed):
            print(f"{error}\nthe same command resumes where the last checkpoint is", file=sys.stderr)
            raise typer.Exit(1) from None
        if isinstance(error, ConfigError | DatasetError | ModelNotFound | RunFolderInUse):
            print(f"bad configuration\n{error}", file=sys.stderr)
            raise typer.Exit(2) from None
        traceback.print_exc()
        raise typer.Exit(1) from None
