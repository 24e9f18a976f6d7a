"""What every benchmark shares: the option ``--json PATH``, and a report with commit, machine and versions."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "numpy", "safetensors")


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
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(packages),
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


def commit() -> dict[str, Any]:
    """The commit measured, and whether tracked files differed from it; id None outside a repository."""
    try:
        git = ["git", "-C", str(ROOT)]
        commit_id = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return {"id": None, "modified": None}
    return {"id": commit_id, "modified": bool(changed.strip())}


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, accelerators, and how busy the machine was."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerators": _accelerators(),
        "system": platform.platform(),
        "load_1min": round(os.getloadavg()[0], 2),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Python's version and those of installed packages, without importing them; None for one that is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    # Only a benchmark that loaded torch used an accelerator; loading it here would disturb those that measure imports.
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return []
    if not torch.cuda.is_available():
        return [str(torch.accelerator.current_accelerator())] * torch.accelerator.device_count()
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
