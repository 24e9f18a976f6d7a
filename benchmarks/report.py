"""What every benchmark shares: the option ``--json PATH``, and a report with commit, machine and versions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from areal.provenance import PACKAGES, provenance


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that already has ``--json PATH``; add the benchmark's own options to it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    return parser


def write_report(
    path: Path | None,
    *,
    unit: str,
    samples: Mapping[str, Sequence[float]],
    ratio: float | None = None,
    packages: Sequence[str] = PACKAGES,
    **results: Any,
) -> dict[str, Any]:
    """Build the report of one benchmark, write it as JSON when there is a path, and return it.

    ``samples`` are raw measurements by name, all in ``unit``; their medians are added. ``ratio`` is ours ÷ theirs in
    the same run; above 1 is better for us. ``results`` holds whatever else the benchmark has to say.
    """
    report = {
        "benchmark": Path(sys.argv[0]).stem,
        "arguments": sys.argv[1:],
        **provenance(packages),
        "unit": unit,
        "samples": {name: list(values) for name, values in samples.items()},
        "median": {name: median(values) for name, values in samples.items() if values},
        **({} if ratio is None else {"ratio": ratio}),
        **results,
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report
