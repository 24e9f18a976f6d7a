"""The shipped recipes learn: the quickstart by at least 20 points of held-out accuracy, whatever the seed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = str(Path(sys.executable).with_name("archon-run"))
LAST_LINE = re.compile(r"held-out reward: (\d\.\d{3}) -> (\d\.\d{3}) \((\d+) prompts, (\d+) steps, (\d+) s\)")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "points"), [(4, 30), (1, 20), (2, 20), (3, 20)])
def test_quickstart_raises_held_out_accuracy(tmp_path: Path, seed: int, points: int) -> None:
    assert learned(tmp_path, f"seed={seed}") >= points


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2e2", "p2t2"])
def test_quickstart_learns_alike_in_any_layout(tmp_path: Path, layout: str) -> None:
    """Half of the run, in which one process gains more than 30 points and so did both of these."""
    assert learned(tmp_path, f"actor.backend=archon:{layout}", "total_train_steps=100") >= 25


def learned(folder: Path, *overrides: str) -> float:
    """Points of held-out accuracy that a run of the quickstart gains."""
    done = subprocess.run(
        [COMMAND, "configs/quickstart.yaml", f"cluster.fileroot={folder}", *overrides],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},  # as `make run` has it
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert found is not None, done.stdout[-2000:]
    before, after, prompts = float(found[1]), float(found[2]), int(found[3])
    assert prompts >= 400
    return 100 * (after - before)
