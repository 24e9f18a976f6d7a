"""Metrics of every step, as one JSON object a line and as TensorBoard scalars."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class MetricsLogger:
    """Writes each step once, even over crashes and resumptions.

    Step 0 is the evaluation before training; step n is the n-th training step. A line is one write, so a reader sees
    whole lines; one cut short by a kill is dropped on the next start.

    Args:
        run_dir: folder of ``metrics.jsonl``.
        tensorboard_dir: where event files go; None is ``run_dir/tensorboard``.
        next_step: the first step this process will log. Lines of this step and later ones, written before the
            checkpoint that the run resumed from, are dropped here and hidden in TensorBoard.
    """

    def __init__(self, run_dir: str | Path, tensorboard_dir: str | Path | None = None, *, next_step: int = 0) -> None:
        self.path = Path(run_dir) / "metrics.jsonl"
        self._tensorboard_dir = (
            Path(tensorboard_dir) if tensorboard_dir is not None else self.path.parent / "tensorboard"
        )
        self._next_step = next_step
        self._first_step = next_step
        self._events: SummaryWriter | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _keep_steps_before(self.path, next_step)
        self._file = self._open()

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step; a value that is not finite becomes null in the file.

        Raises:
            ValueError: the step, or a later one, was logged already.
        """
        if step < self._next_step:
            raise ValueError(f"step {step} is logged already: the next one is {self._next_step} or later")
        self._next_step = step + 1
        row = {"step": step, "version": version} | _finite(metrics)
        os.write(self._file, _line(row))
        self._add_scalars(step, metrics)

    def log_more(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics, such as those of the last evaluation, to the object of a step that is logged already.

        Raises:
            ValueError: the step is not logged.
        """
        rows = list(read_metrics(self.path))
        found = [row for row in rows if row["step"] == step]
        if not found:
            raise ValueError(f"step {step} is not logged: {self.path} has steps {[row['step'] for row in rows[-5:]]}")
        found[0].update(_finite(metrics))
        os.close(self._file)
        _rewrite(self.path, rows)
        self._file = self._open()
        self._add_scalars(step, metrics)

    def close(self) -> None:
        os.close(self._file)
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def _add_scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer().add_scalar(name, float(value), step)
        self._writer().flush()

    def _writer(self) -> SummaryWriter:
        if self._events is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            purge_step = self._first_step or None
            self._events = SummaryWriter(str(self._tensorboard_dir), purge_step=purge_step)
        return self._events


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a ``metrics.jsonl``; a last line cut short by a kill is left out.

    Raises:
        ValueError: a damaged line before the last one.
    """
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines):  # complete lines end in a newline, so this is nothing or a torn write
            return
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON object: {line[:80]!r}") from error


def _keep_steps_before(path: Path, step: int) -> None:
    if path.exists():
        _rewrite(path, [row for row in read_metrics(path) if row["step"] < step])


def _rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the file atomically."""
    scratch = path.with_suffix(".jsonl.tmp")
    with scratch.open("wb") as file:
        file.writelines(map(_line, rows))
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Values as JSON has them: not finite becomes null."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
