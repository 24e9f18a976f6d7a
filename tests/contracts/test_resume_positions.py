"""A resumed run goes on where it stood: no prompt repeated, none skipped, whatever the epoch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rollout_helpers import episode, rollout, train, trajectory

from areal.rollout.episodes import EpisodeTask
from areal.rollout.journal import Journal, JournalError
from areal.rollout.recovery import audit
from areal.rollout.trajectory import Trajectory


def trained_ids(folder: Path, lives: list[int | None], count: int = 7, epochs: int = 3) -> list[str]:
    """Prompt ids in training order of a run that is stopped after each number of steps; None: run to the end."""
    ids: list[str] = []
    version = 0
    for steps in lives:
        with rollout(
            folder, episode, count=count, epochs=epochs, batch=2, eta=0, n_samples=1, shuffle=True, version=version,
            stop_reason="signal" if steps else "run_ended",
        ) as (executor, journal):  # fmt: skip
            for batch in train(executor, journal, version, steps):
                version += 1
                ids += [sample.prompt_id for sample in batch.trajectories]
    return ids


def test_resuming_twice_across_an_epoch_edge_gives_the_order_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = trained_ids(tmp_path / "whole", [None])
    resumed = trained_ids(tmp_path / "resumed", [2, 3, 1, None])
    assert resumed == whole
    epochs = [whole[0:7], whole[7:14], whole[14:21]]
    assert all(sorted(ids) == sorted(epochs[0]) for ids in epochs), "every epoch holds every prompt"
    assert len({tuple(ids) for ids in epochs}) == 3, "every epoch is shuffled anew"


def test_dropped_prompts_leave_no_gap_and_are_not_repeated(tmp_path: Path) -> None:
    sampled: list[int] = []

    async def drop_three_and_five(task: EpisodeTask) -> Trajectory | None:
        sampled.append(task.prompt.place)
        return None if task.prompt.place in (3, 5) else trajectory()

    version = 0
    for steps in (2, 1, None):
        with rollout(
            tmp_path, drop_three_and_five, count=10, batch=2, eta=0, n_samples=1, version=version,
            stop_reason="signal" if steps else "run_ended",
        ) as (executor, journal):  # fmt: skip
            version += len(train(executor, journal, version, steps))
    journal = Journal.open(tmp_path, "config")
    audit(journal, finished=True)
    counts = journal.counts()
    assert counts["prompt/trained"] == 8 and counts["prompt/dropped/empty"] == 2
    assert sampled.count(3) == sampled.count(5) == 1
    assert set(sampled) == set(range(10))
    journal.close()


def test_leases_of_a_stopped_run_do_not_leak(tmp_path: Path) -> None:
    rng, version, done = random.Random(5), 0, 0
    while done < 24:
        with rollout(tmp_path, episode, count=24, batch=2, eta=3, version=version, stop_reason="signal") as (
            executor,
            journal,
        ):
            batches = train(executor, journal, version, rng.randint(0, 2))
            version += len(batches)
            done += sum(len(batch.groups) for batch in batches)
    journal = Journal.open(tmp_path, "config")
    audit(journal, finished=True)
    assert journal.counts()["prompt/trained"] == 24
    journal.close()


def test_fresh_run_does_not_take_up_rollouts_of_another(tmp_path: Path) -> None:
    with rollout(tmp_path, episode, count=4, stop_reason="signal") as (executor, journal):
        train(executor, journal, steps=1)
    with pytest.raises(JournalError, match="holds a run of configuration config, this one is changed"):
        Journal.open(tmp_path, "changed")
