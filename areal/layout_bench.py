"""``archon bench``: layouts side by side in a table, and as JSON with everything that was measured."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from archon.bench import Measurement, Workload, launched_world, run, run_here
from areal.provenance import provenance

_WIDTH = 140
"""Columns where the output is no terminal."""


def run_bench(layouts: Sequence[str], workload: Workload, world: int | None, json_path: Path | None) -> bool:
    """Measure, print the table, write the JSON; False if every layout failed.

    Under a launcher every process calls this, and rank 0 prints and writes.
    """
    speaks = int(os.environ.get("RANK", "0")) == 0
    console = Console(highlight=False, quiet=not speaks, width=None if sys.stdout.isatty() else _WIDTH)
    found: list[Measurement] = []
    measurements = run_here(layouts, workload) if launched_world() else run(layouts, workload, world)
    with Live(layout_table(found), console=console, refresh_per_second=1, transient=True) as live:
        for measurement in measurements:
            found.append(measurement)
            live.update(layout_table(found))
    console.print(layout_table(found))
    if json_path is not None and speaks:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(_report(found, workload), indent=2) + "\n", encoding="utf-8")
    return any(measurement.failure is None for measurement in found)


def layout_table(found: Sequence[Measurement]) -> Table:
    """One row a layout; one that failed has a reason in place of numbers."""
    table = Table(caption="MB sent: in one step, by all ranks together")
    table.add_column("layout", overflow="fold")
    for title in ("tokens/s", "GFLOP/s", "of matmul peak", "peak MiB per rank", "MB sent", "ratio"):
        table.add_column(title, justify="right")
    failed = any(measurement.failure is not None for measurement in found)
    if failed:
        table.add_column("failed because", overflow="fold")
    for measurement in found:
        if measurement.failure is not None:
            table.add_row(measurement.layout, *["–"] * 6, measurement.failure)
            continue
        ratio = _ratio(measurement, found[0])
        table.add_row(
            measurement.layout,
            f"{measurement.tokens_per_second:,.0f}",
            f"{measurement.flops_per_second / 1e9:,.1f}",
            f"{measurement.flops_per_second / measurement.matmul_flops:.1%}",
            f"{max(measurement.peak_memory_bytes) / 2**20:,.0f}",
            "\n".join(f"{kind} {size / 1e6:,.2f}" for kind, size in sorted(measurement.communication_bytes.items())),
            "–" if ratio is None else f"{ratio:.2f}",
            *([""] if failed else []),
        )
    return table


def _ratio(measurement: Measurement, first: Measurement) -> float | None:
    """Tokens per second as a multiple of the first layout's."""
    if measurement.failure is not None or first.failure is not None:
        return None
    return measurement.tokens_per_second / first.tokens_per_second


def _report(found: Sequence[Measurement], workload: Workload) -> dict[str, Any]:
    layouts = [
        {
            **asdict(measurement),
            "tokens_per_second": measurement.tokens_per_second,
            "flops_per_second": measurement.flops_per_second,
            "ratio": _ratio(measurement, found[0]),
        }
        for measurement in found
    ]
    return {
        "benchmark": "archon bench",
        "arguments": sys.argv[1:],
        **provenance(),
        "workload": asdict(workload),
        "unit": "seconds per step",
        "layouts": layouts,
    }
