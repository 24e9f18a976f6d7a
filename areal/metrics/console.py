"""Progress for a person: a live table in a terminal, one plain line a step anywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_RECENT_STEPS = 20
"""Steps that the shown pace is averaged over."""


class ProgressView:
    """Shows step, reward, held-out reward, lag, tokens/s, loss and the time left.

    ::

        with ProgressView() as view:
            view.message("warm start: 75 steps")
            view.step(1, 150, {"reward/mean": 0.4, "time/step": 1.2})

    Args:
        console: where to draw; None is stdout.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._paces: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._held_out: float | None = None
        self._live: Live | None = None

    def __enter__(self) -> ProgressView:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def message(self, text: str) -> None:
        """One line above the live table, or just one line."""
        self._console.print(text, markup=False)

    def warm_start(self, total: int, step: int, metrics: Mapping[str, float]) -> None:
        """Show supervised step ``step`` of ``total``: a line for every tenth of them."""
        if step in (1, total) or step % max(1, total // 10) == 0:
            self.message(f"warm start {step}/{total}  loss {_number(metrics.get('loss'), '.4f')}")

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Show one finished step of ``total``; the held-out reward stays until the next evaluation."""
        self._held_out = metrics.get("eval/reward", self._held_out)
        if "time/step" in metrics:
            self._paces.append(metrics["time/step"])
        cells = self._cells(step, total, metrics)
        if self._live is not None:
            self._live.update(self._table(cells), refresh=True)
        else:
            self._console.print("  ".join(f"{name} {value}" for name, value in cells.items()), markup=False)

    def _cells(self, step: int, total: int, metrics: Mapping[str, float]) -> dict[str, str]:
        pace = sum(self._paces) / len(self._paces) if self._paces else None
        cells = {
            "step": f"{step}/{total}",
            "reward": _number(metrics.get("reward/mean"), ".3f"),
            "held-out": _number(self._held_out, ".3f"),
            "lag": _number(metrics.get("staleness/max"), ".0f"),
            "tokens/s": _number(metrics.get("throughput/tokens_per_second"), ",.0f"),
            "loss": _number(metrics.get("loss"), ".4f"),
            "s/step": _number(pace, ".2f"),
            "elapsed": duration(time.monotonic() - self._started),
            "ETA": duration(pace * (total - step)) if pace is not None else "-",
        }
        return cells

    def _table(self, cells: Mapping[str, str]) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.ROUNDED)
        for name in cells:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row(*cells.values())
        return table


def duration(seconds: float) -> str:
    """``42s``, ``3m05s`` or ``2h07m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
