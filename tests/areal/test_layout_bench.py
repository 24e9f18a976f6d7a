"""``archon bench``: its table, its report and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from archon.bench import Measurement
from areal.cli import app
from areal.layout_bench import layout_table

MODEL = str(Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny_qwen3_moe")


def test_a_failed_layout_is_a_row_with_its_reason() -> None:
    ran = Measurement("d1", None, [0.5], 100, 1e9, 1e10, [2**20], {"all-gather": 2_000_000}, 1.0)
    faster = Measurement("d2", None, [0.25], 100, 1e9, 1e10, [2**20] * 2, {}, 1.0)
    console = Console(width=140)
    with console.capture() as capture:
        console.print(layout_table([ran, faster, Measurement("d3", "rank 1 died")]))
    rows = [line.split("│") for line in capture.get().splitlines() if "│" in line]
    assert [cell.strip() for cell in rows[0][1:-1]] == ["d1", "200", "2.0", "20.0%", "1", "all-gather 2.00", "1.00", ""]
    assert rows[1][7].strip() == "2.00"
    assert rows[2][1].strip() == "d3" and rows[2][8].strip() == "rank 1 died"


def test_command_prints_the_table_and_writes_json(tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.json"
    arguments = ["--tokens", "64", "--sequences", "2", "--steps", "2", "--warmup", "0", "--json", str(report)]
    result = CliRunner().invoke(app, ["bench", "d1", "d1t3", "--model", MODEL, *arguments])
    assert result.exit_code == 0
    words = " ".join(result.stdout.replace("│", " ").split())
    assert "tokens/s" in words and "nearest layout that fits: " in words
    written = json.loads(report.read_text())
    assert written["commit"].keys() == {"id", "modified"} and written["versions"]["torch"]
    assert written["workload"]["tokens"] == 64 and written["workload"]["options"]["context"] == "ulysses"
    ran, failed = written["layouts"]
    assert len(ran["seconds"]) == 2 and ran["ratio"] == 1.0 and ran["tokens_per_second"] > 0
    assert failed["failure"] and failed["ratio"] is None


def test_exit_codes() -> None:
    command = CliRunner().invoke
    assert command(app, ["bench", "d1t3", "--model", MODEL]).exit_code == 1
    missing = command(app, ["bench", "d1", "--model", MODEL + "_missing"])
    assert missing.exit_code == 2 and "has no config.json" in missing.stderr
    assert command(app, ["bench", "d1", "--model", MODEL, "--option", "x=1"]).exit_code == 2


def test_a_launcher_with_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused = CliRunner().invoke(app, ["bench", "d2", "--model", MODEL, "--world", "2"])
    assert refused.exit_code == 2 and "the launcher started 4 processes" in refused.stderr
