"""The accelerator benchmark runs from end to end on the CPU, so that no device time is lost to a typing error."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "kernels_gpu.py"
OPS = (
    "linear_logprob",
    "topk_gate",
    "masked_policy_loss",
    "sort_by_expert",
    "permute",
    "combine",
    "grouped_swiglu",
    "grouped_linear",
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "ARCHON_KERNELS")}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=300, check=False)


def rows_of(report: dict[str, Any], contender: str) -> list[dict[str, Any]]:
    return [row for row in report["results"] if row["contender"] == contender]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["cpp", "reference", "triton"])
def test_a_dry_run_checks_and_times_every_op(kernels: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    environment = {"ARCHON_KERNELS": kernels} | ({"TRITON_INTERPRET": "1"} if kernels == "triton" else {})
    done = run("--dry", "--json", str(path), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert {row["op"] for row in report["parity"]} == set(OPS)
    assert all(row["error"] <= row["tolerance"] for row in report["parity"])
    for contender in ("archon", "torch", "torch.compile"):
        rows = rows_of(report, contender)
        assert {row["op"] for row in rows} == set(OPS)
        assert not [row for row in rows if "error" in row]
        assert all(len(report["samples"][f"{row['op']} {row['case']} {contender}"]) >= 5 for row in rows)
    assert set(report["skewed_over_uniform"]) == set(OPS[3:])
    assert report["ceilings"]["flops"] > 0 and report["ceilings"]["bytes"] > 0
    assert report["commit"]["id"] and report["versions"]["torch"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module of this process, which saves the imports of another."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.delenv("ARCHON_KERNELS", raising=False)
    return importlib.import_module(SCRIPT.stem)


def failures_and_report(
    script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[str, dict[str, Any]]:
    path = folder / "report.json"
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--dry", *arguments, "--json", str(path)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    return str(ended.value.code), json.loads(path.read_text())


def test_a_broken_op_is_recorded_and_the_others_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "sort_by_expert", lambda *_: 1 / 0)
    failures, report = failures_and_report(script, tmp_path, monkeypatch, "--ops", "permute", "topk_gate")
    assert "parity of permute uniform" in failures and "topk_gate" not in failures
    assert {row["op"] for row in rows_of(report, "archon") if "error" in row} == {"permute"}
    assert {row["op"] for row in rows_of(report, "archon") if "ms" in row} == {"topk_gate"}
    assert "ZeroDivisionError" in report["failures"][0]


def test_nothing_starts_after_the_time_budget(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, report = failures_and_report(script, tmp_path, monkeypatch, "--ops", "permute", "--budget", "0")
    assert "the time budget is spent" in failures and not any("ms" in row for row in report["results"])
