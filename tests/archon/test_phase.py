"""A phase is seen from outside, also after its process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from archon import phase

SCRIPT = """
import os, signal, subprocess, sys
from archon import phase
child = "from archon import phase; phase.set('of the child')"
subprocess.run([sys.executable, "-c", child], check=True)
with phase.of("reduce"):
    phase.set("forward/backward", 3)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_its_phase(tmp_path: Path) -> None:
    file = tmp_path / "phase"
    assert phase.read(file) is None
    environment = {**os.environ, phase.ENVIRONMENT_VARIABLE: str(file)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    left = phase.read(file)
    assert left is not None
    assert (left.name, left.micro_batch, str(left)) == ("forward/backward", 3, "forward/backward of micro-batch 3")


def test_a_phase_ends_with_its_block_unless_it_failed() -> None:
    phase.set("idle")
    with phase.of("prepare"):
        with phase.of("reduce", 0):
            assert str(phase.now()) == "reduce of micro-batch 0"
        assert phase.now().name == "prepare"
    assert phase.now().name == "idle"
    with pytest.raises(ValueError), phase.of("optimizer"):
        raise ValueError
    assert phase.now().name == "optimizer"
