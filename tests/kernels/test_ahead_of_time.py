"""Every Triton kernel compiles for devices that are not here, fits them, and is in the table that says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "kernels_compile.py"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux only"),
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own: the other tests may run Triton's interpreter."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "ARCHON_KERNELS")}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), kept.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("compiled") / "report.json"
    done = run("--json", str(path))
    return done, json.loads(path.read_text())["kernels"] if path.exists() else []


def launches(rows: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(row["module"], row["kernel"], row["variant"]) for row in rows}


def test_every_kernel_compiles_and_fits_every_target(
    compiled: tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]],
) -> None:
    done, rows = compiled
    assert done.returncode == 0, done.stdout + done.stderr
    assert launches(rows) and len(rows) == len(TARGETS) * len(launches(rows)), "two launches have the same name"
    assert all(row["registers"] > 0 for row in rows)
    for target, limit in {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}.items():
        assert max(row["shared_bytes"] for row in rows if row["target"] == target) <= limit * 1024
    assert not [row for row in rows if row["target"] == "sm_90" and row["spilled"]]


def test_every_module_of_kernels_lists_its_launches(
    compiled: tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]],
) -> None:
    _, rows = compiled
    folder = ROOT / "kernels" / "archon_kernels" / "triton_ops"
    kernels = set()
    for path in folder.glob("*.py"):
        text = path.read_text()
        names = re.findall(r"^@triton\.jit\b.*\ndef (\w+)\(", text, re.MULTILINE)
        # One that other kernels call is part of them.
        kernels |= {(path.stem, name) for name in names if len(re.findall(rf"\b{name}\(", text)) == 1}
    assert kernels == {(module, kernel) for module, kernel, _ in launches(rows)}


def test_the_committed_table_names_every_launch(
    compiled: tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]],
) -> None:
    _, rows = compiled
    committed = json.loads((ROOT / "benchmarks" / "results" / "kernels_compile.json").read_text())["kernels"]
    again = f"run python {SCRIPT.relative_to(ROOT)} --json {{the committed file}} --page docs/kernels.md"
    assert launches(committed) == launches(rows), again


def test_the_page_shows_the_committed_table(tmp_path: Path) -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import kernels_compile
    finally:
        sys.path.remove(str(SCRIPT.parent))
    committed = json.loads((ROOT / "benchmarks" / "results" / "kernels_compile.json").read_text())["kernels"]
    page = ROOT / "docs" / "kernels.md"
    copy = tmp_path / "kernels.md"
    copy.write_text(page.read_text())
    kernels_compile.write_page(copy, kernels_compile.table(committed))
    assert copy.read_text() == page.read_text()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """A module with one kernel that is too big and one that does not compile, beside the real ones."""
    package = tmp_path / "archon_kernels" / "triton_ops"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    original = ROOT / "kernels" / "archon_kernels" / "triton_ops" / "__init__.py"
    (package / "__init__.py").write_text(original.read_text())
    (package / "faulty.py").write_text(FAULTY)
    done = run("--processes", "1", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.returncode == 1
    assert "faulty.product huge for gfx942 needs 131072 bytes of shared memory of 65536" in done.stderr
    assert "faulty.misfit for sm_90 does not compile" in done.stderr
    assert "faulty.hoard for sm_90 spills" in done.stderr


def test_the_interpreter_is_refused() -> None:
    done = run(TRITON_INTERPRET="1")
    assert done.returncode == 1 and "TRITON_INTERPRET=1 is set" in done.stderr


FAULTY = """
import triton
import triton.language as tl

from archon_kernels.triton_ops import Compiled


@triton.jit
def _product(a, b, c, DEPTH: tl.constexpr):
    row, inner = tl.arange(0, 64), tl.arange(0, DEPTH)
    left = tl.load(a + row[:, None] * DEPTH + inner[None, :])
    right = tl.load(b + inner[:, None] * 64 + row[None, :])
    tl.store(c + row[:, None] * 64 + row[None, :], tl.dot(left, right))


@triton.jit
def _misfit(a, SIZE: tl.constexpr):
    tl.store(a + tl.arange(0, SIZE), tl.arange(0, 2 * SIZE))


@triton.jit
def _hoard(a, b, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(b + place, tl.cumsum(tl.load(a + place), 0))


COMPILED = (
    Compiled(
        _product, {"a": "*fp32", "b": "*fp32", "c": "*fp32", "DEPTH": "constexpr"}, {"DEPTH": 512}, variant="huge"
    ),
    Compiled(_misfit, {"a": "*fp32", "SIZE": "constexpr"}, {"SIZE": 64}),
    Compiled(_hoard, {"a": "*fp32", "b": "*fp32", "SIZE": "constexpr"}, {"SIZE": 16384}, num_warps=1),
)
"""
