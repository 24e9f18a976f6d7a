"""Where a measurement comes from: the time, the commit, the machine, and the versions of what ran."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "numpy", "safetensors")


def provenance(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """``time``, ``commit``, ``machine`` and ``versions``, as plain data."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(packages),
    }


def commit() -> dict[str, Any]:
    """The commit measured, and whether tracked files differed from it; id None outside a repository."""
    if not (ROOT / ".git").exists():  # installed, perhaps below another project's repository
        return {"id": None, "modified": None}
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
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
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
