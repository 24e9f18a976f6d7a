"""Metrics: every step once, on disk and in TensorBoard, over kills and resumptions; views and the plot."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from areal.metrics.console import ProgressView, duration
from areal.metrics.logger import MetricsLogger, read_metrics
from areal.metrics.plot import plot_reward, smooth


def tensorboard_scalars(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_one_object_per_step_and_the_same_in_tensorboard(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as log:
        log.log(1, 1, {"reward/mean": 0.25, "loss": 2})
        log.log(2, 2, {"reward/mean": 0.5, "loss": math.nan})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "version": 1, "reward/mean": 0.25, "loss": 2.0},
        {"step": 2, "version": 2, "reward/mean": 0.5, "loss": None},
    ]
    assert tensorboard_scalars(tmp_path / "tensorboard", "reward/mean") == {1: 0.25, 2: 0.5}


def test_a_step_is_never_logged_twice(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as log:
        log.log(3, 3, {})
        with pytest.raises(ValueError, match="step 3 is logged already"):
            log.log(3, 3, {})


def test_more_of_a_logged_step_goes_into_its_object(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as log:
        log.log(1, 1, {"reward/mean": 0.25})
        log.log_more(1, {"eval/reward": 0.75})
        log.log(2, 2, {})
        with pytest.raises(ValueError, match="step 3 is not logged"):
            log.log_more(3, {})
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [
        {"step": 1, "version": 1, "reward/mean": 0.25, "eval/reward": 0.75},
        {"step": 2, "version": 2},
    ]
    assert tensorboard_scalars(tmp_path / "tensorboard", "eval/reward") == {1: 0.75}


def test_resuming_drops_the_steps_that_run_again(tmp_path: Path) -> None:
    events = tmp_path / "elsewhere"
    with MetricsLogger(tmp_path, events) as log:
        for step in range(6):
            log.log(step, step, {"reward/mean": float(step)})
    with MetricsLogger(tmp_path, events, next_step=4) as log:
        log.log(4, 4, {"reward/mean": 40.0})
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    assert tensorboard_scalars(events, "reward/mean") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 40}


def test_a_torn_last_line_is_dropped_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "version": 1}\n{"step": 2, "vers')
    with MetricsLogger(tmp_path, next_step=3) as log:
        log.log(3, 3, {})
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_metrics(path))


def test_lines_of_a_killed_process_are_whole(tmp_path: Path) -> None:
    script = (
        "import itertools, sys\n"
        "from areal.metrics.logger import MetricsLogger\n"
        "log = MetricsLogger(sys.argv[1])\n"
        "for step in itertools.count():\n"
        "    log.log(step, step, {'reward/mean': 0.5})\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = [int(process.stdout.readline()) for _ in range(50)][-1]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    steps = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(len(steps))) and len(steps) > seen


def test_plain_lines_without_a_terminal() -> None:
    output = io.StringIO()
    with ProgressView(Console(file=output, soft_wrap=True)) as view:
        view.message("warm start [75 steps]")
        view.step(0, 100, {"eval/reward": 0.125})
        view.step(
            1,
            100,
            {"reward/mean": 0.5, "time/step": 2.0, "staleness/max": 3, "throughput/tokens_per_second": 1234.5},
        )
    message, first, second = output.getvalue().splitlines()
    assert message == "warm start [75 steps]"
    assert "step 0/100" in first and "held-out 0.125" in first and "ETA -" in first
    for part in ("step 1/100", "reward 0.500", "held-out 0.125", "lag 3", "tokens/s 1,234", "ETA 3m18s"):
        assert part in second
    assert "\x1b" not in output.getvalue()


def test_warm_start_is_a_dozen_lines_at_most() -> None:
    output = io.StringIO()
    with ProgressView(Console(file=output, soft_wrap=True)) as view:
        for step in range(1, 76):
            view.warm_start(75, step, {"loss": 1 / step})
    lines = output.getvalue().splitlines()
    assert lines[0] == "warm start 1/75  loss 1.0000" and lines[-1] == "warm start 75/75  loss 0.0133"
    assert 5 < len(lines) <= 13


def test_live_table_in_a_terminal() -> None:
    output = io.StringIO()
    with ProgressView(Console(file=output, force_terminal=True, width=120)) as view:
        view.step(1, 10, {"reward/mean": 0.5, "time/step": 30.0})
    assert "0.500" in output.getvalue() and "4m30s" in output.getvalue()
    assert "\x1b[?25h" in output.getvalue(), "the cursor is shown again at the end"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_smoothing_is_the_mean_of_the_neighbours() -> None:
    assert smooth([0.0, 3.0, 6.0, 0.0], 3) == [1.5, 3.0, 3.0, 3.0]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0]


def test_plot_is_a_picture_with_both_curves(tmp_path: Path) -> None:
    from matplotlib.image import imread

    run = tmp_path / "experiment" / "trial0"
    with MetricsLogger(run) as log:
        log.log(0, 0, {"eval/reward": 0.1})
        for step in range(1, 40):
            log.log(step, step, {"reward/mean": step / 40} | ({"eval/reward": step / 40} if step % 13 == 0 else {}))
    plot_reward(run / "metrics.jsonl", run / "plots" / "reward.png")
    image = imread(run / "plots" / "reward.png")[..., :3]
    blue = (abs(image - [0x2B / 255, 0x6C / 255, 0xB0 / 255]) < 0.02).all(-1)
    orange = (abs(image - [0xC0 / 255, 0x56 / 255, 0x21 / 255]) < 0.02).all(-1)
    assert image.shape[1] >= 1000 and blue.sum() > 500 and orange.sum() > 200


def test_plot_of_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "version": 1}\n')
    with pytest.raises(ValueError, match="no reward/mean"):
        plot_reward(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
