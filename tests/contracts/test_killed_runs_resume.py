"""kill -9 of ``archon-run`` at random moments, then the same command again."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import recipe, write_model

from archon.weights import digest, read_folder
from areal.config import Config, load_config, resolved_yaml
from areal.metrics.logger import read_metrics
from areal.rollout.journal import Journal
from areal.rollout.recovery import audit
from areal.run_identity import config_digest

COMMAND = str(Path(sys.executable).with_name("archon-run"))
DEADLINE = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def write_recipe(folder: Path, model: Path, **changes: Any) -> tuple[Path, Config]:
    folder.mkdir(parents=True)
    config = load_config(recipe(model, folder, **changes))
    (folder / "recipe.yaml").write_text(resolved_yaml(config))
    return folder / "recipe.yaml", config


def run_to_the_end(path: Path) -> str:
    done = subprocess.run([COMMAND, str(path)], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr[-4000:]
    last = done.stdout.splitlines()[-1]
    assert re.match(r"held-out reward: \d\.\d{3} -> \d\.\d{3} \(", last), last
    return last


def steps_recorded(config: Config) -> int:
    path = config.run_dir / "metrics.jsonl"
    return len(list(read_metrics(path))) if path.exists() else 0


def kill_while_it_trains(path: Path, config: Config, wait: float) -> bool:
    """Start the run, wait until it has made progress and then ``wait`` seconds, kill -9; False if it ended before."""
    before = steps_recorded(config)
    with (path.parent / "killed.log").open("ab") as log:
        process = subprocess.Popen([COMMAND, str(path)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + DEADLINE
        while process.poll() is None and steps_recorded(config) <= before:
            assert time.monotonic() < deadline, (path.parent / "killed.log").read_text()[-4000:]
            time.sleep(0.01)
        time.sleep(wait)
        if process.poll() is not None:
            assert process.returncode == 0, (path.parent / "killed.log").read_text()[-4000:]
            return False
        process.send_signal(signal.SIGKILL)
        return True
    finally:
        process.kill()
        process.wait(10)


def final_state(config: Config) -> tuple[str, dict[str, int], list[int]]:
    """Digest of the final weights, journal counts after a full audit, and the logged steps."""
    journal = Journal.open(config.run_dir, config_digest(config))
    try:
        audit(journal, finished=True)
        step = journal.steps
        return (
            digest(read_folder(config.run_dir / "hf" / f"step_{step}")),
            journal.counts(),
            [row["step"] for row in read_metrics(config.run_dir / "metrics.jsonl")],
        )
    finally:
        journal.close()


def check_interrupted_equals_uninterrupted(tmp_path: Path, model: Path, kills: int, **changes: Any) -> None:
    uninterrupted, whole = write_recipe(tmp_path / "whole", model, **changes)
    interrupted, broken = write_recipe(tmp_path / "broken", model, **changes)
    run_to_the_end(uninterrupted)
    moments = random.Random(0)
    killed = sum(kill_while_it_trains(interrupted, broken, moments.uniform(0.0, 0.5)) for _ in range(kills))
    assert killed >= kills // 2
    run_to_the_end(interrupted)
    expected_digest, expected_counts, steps = final_state(whole)
    found_digest, counts, found_steps = final_state(broken)
    assert found_steps == steps == list(range(whole.total_train_steps + 1))
    assert counts["prompt/trained"] == expected_counts["prompt/trained"]
    assert counts["trajectory/trained"] == expected_counts["trajectory/trained"]
    assert found_digest == expected_digest


DETERMINISTIC = {"rollout__deterministic_sampling": True, "recover__freq_steps": 3}


def test_killed_twice_a_deterministic_run_ends_bit_equal(model: Path, tmp_path: Path) -> None:
    check_interrupted_equals_uninterrupted(tmp_path, model, kills=2, total_train_steps=5, **DETERMINISTIC)


@pytest.mark.slow
def test_killed_ten_times_a_deterministic_run_ends_bit_equal(model: Path, tmp_path: Path) -> None:
    """With a warm start, multi-turn episodes, several updates a step and groups that are filtered away."""
    check_interrupted_equals_uninterrupted(
        tmp_path,
        model,
        kills=10,
        total_train_steps=14,
        train_dataset__dataset_kwargs={"size": 200, "min_word_len": 3, "max_word_len": 5},
        warm_start={
            "steps": 5,
            "batch_size": 16,
            "dataset": {
                "path": "reasoning_gym/spell_backward",
                "split": "warm_start",
                "dataset_kwargs": {"size": 64, "min_word_len": 3, "max_word_len": 5},
            },
        },
        workflow="areal.workflows.MultiTurnWorkflow",
        dynamic_filter_fn="areal.algorithms.filters.drop_uniform_rewards",
        actor__ppo_n_minibatches=2,
        **DETERMINISTIC,
    )


@pytest.mark.slow
def test_killed_ten_times_an_asynchronous_epoch_loses_nothing_and_trains_nothing_twice(
    model: Path, tmp_path: Path
) -> None:
    path, config = write_recipe(
        tmp_path / "run",
        model,
        total_train_steps=None,
        train_dataset__dataset_kwargs={"size": 60, "min_word_len": 3, "max_word_len": 5},
        rollout__max_head_offpolicyness=3,
        recover__freq_steps=4,
    )
    moments = random.Random(1)
    killed = sum(kill_while_it_trains(path, config, moments.uniform(0.0, 0.5)) for _ in range(10))
    assert killed >= 5
    run_to_the_end(path)
    _, counts, steps = final_state(config)
    assert counts == {"prompt/trained": 60, "trajectory/trained": 240} | {
        name: count for name, count in counts.items() if name.startswith("trajectory/dropped")
    }
    assert steps == list(range(16))
    assert all(row["staleness/max"] <= 3 for row in read_metrics(config.run_dir / "metrics.jsonl") if row["step"])
