"""Ages, capacities and queues: what must hold however rollouts end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path

import pytest
from rollout_helpers import Serving, episode, places, rollout, train, trajectory

from areal.rollout.episodes import EpisodeTask
from areal.rollout.errors import ExecutorError
from areal.rollout.recovery import audit
from areal.rollout.staleness import StalenessGate
from areal.rollout.trajectory import Trajectory


def test_capacity_after_recovery_at_a_large_version_is_that_of_a_fresh_run() -> None:
    gate = StalenessGate(batch_size=8, max_head_offpolicyness=2)
    gate.rebase(100, {})
    assert gate.capacity() == (2 + 1) * 8
    gate.rebase(100, {1: 99, 2: 100, 5: 98})
    assert gate.capacity() == (2 + 1) * 8 - 3


def test_rejections_do_not_open_the_gate_further_and_further(tmp_path: Path) -> None:
    """Half of the prompts are rejected for forty steps: what is in flight stays within the bound."""
    most = 0

    async def half(task: EpisodeTask) -> Trajectory | None:
        return trajectory() if task.prompt.place % 2 else None

    for dynamic_bs in (False, True):
        with rollout(
            tmp_path / str(dynamic_bs), half, count=240, batch=3, eta=1, n_samples=1, dynamic_bs=dynamic_bs
        ) as (executor, journal):
            version = 0
            while (batch := executor.next_batch(version)) is not None:
                stats = executor.stats()
                most = max(most, stats["rollout/running"] + stats["rollout/waiting"])
                assert all(version - t.oldest_version <= 1 for t in batch.trajectories)
                journal.record_batch(version, batch.trajectory_ids, batch.seed)
                journal.finish_batch(version, "d")
                version += 1
                Serving.version = version
                executor.set_version(version)
            assert version == 40 if not dynamic_bs else version >= 79
    assert most <= (1 + 1) * 3


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_bound_is_strict_for_every_token_under_a_long_tail(tmp_path: Path, eta: int) -> None:
    async def tailed(task: EpisodeTask) -> Trajectory:
        admitted = Serving.version
        await asyncio.sleep(0.2 if task.prompt.place % 7 == 0 else 0.002)
        sample = trajectory(admitted)
        sample.versions[-1] = Serving.version  # the last token is sampled after whatever updates came in between
        return sample

    ages: set[int] = set()
    with rollout(tmp_path, tailed, count=42, batch=3, eta=eta, n_samples=1) as (executor, journal):
        for batch in train(executor, journal):
            for sample in batch.trajectories:
                ages |= {batch.version - int(v) for v in sample.versions[sample.loss_mask]}
    assert ages <= set(range(eta + 1))
    assert eta == 0 or max(ages) >= 1, "the run was asynchronous"


def test_run_to_the_last_step_ends_clean_with_nothing_in_flight(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with rollout(tmp_path, episode, count=100, batch=2, eta=4, total_steps=5) as (executor, journal):
        assert len(train(executor, journal)) == 5
        assert executor.next_batch(5) is None
        assert executor.stats()["rollout/leased"] == 10, "nothing was admitted that no step would train"
    assert set(threading.enumerate()) == before


def test_groups_completed_beyond_the_batch_are_all_used_once(tmp_path: Path) -> None:
    with rollout(tmp_path, episode, count=12, batch=4, eta=2) as (executor, journal):
        while journal.counts().get("prompt/complete", 0) < 12:
            time.sleep(0.01)
        assert places(train(executor, journal)) == list(range(12))


def test_waiting_for_a_batch_does_not_hang_when_prompts_are_rejected(tmp_path: Path) -> None:
    async def mostly_rejected(task: EpisodeTask) -> Trajectory | None:
        return trajectory() if task.prompt.place in (3, 9) else None

    with rollout(tmp_path, mostly_rejected, count=10, batch=2, eta=0) as (executor, journal):
        assert places(train(executor, journal)) == [3, 9]


def test_final_partial_batch_is_trained(tmp_path: Path) -> None:
    with rollout(tmp_path, episode, count=7, batch=3, eta=1) as (executor, journal):
        assert [len(batch.groups) for batch in train(executor, journal)] == [3, 3, 1]
        audit(journal, finished=True)


def test_group_with_a_failed_episode_is_never_accepted_short(tmp_path: Path) -> None:
    async def flaky(task: EpisodeTask) -> Trajectory:
        if task.attempt == 0 and task.sample == task.prompt.place % 4:
            raise OSError("connection reset")
        return trajectory()

    with rollout(tmp_path, flaky, count=6, batch=3, eta=1, n_samples=4, max_concurrent=4) as (executor, journal):
        for batch in train(executor, journal):
            assert [len(group.trajectories) for group in batch.groups] == [4] * len(batch.groups)
            assert len(set(batch.trajectory_ids)) == 4 * len(batch.groups)


def test_exception_in_a_background_task_fails_the_run_at_once(tmp_path: Path) -> None:
    class EngineDied(Exception):
        pass

    async def dead(task: EpisodeTask) -> Trajectory:
        await asyncio.sleep(0.05)
        raise EngineDied("generation thread ended")

    with rollout(
        tmp_path, dead, count=1000, batch=100, n_samples=1, episode_timeout=3600, fatal_errors=(EngineDied,)
    ) as (executor, _):
        began = time.monotonic()
        with pytest.raises(ExecutorError, match="generation thread ended"):
            executor.next_batch(0)
        assert time.monotonic() - began < 5


def test_counters_are_not_reset_by_reading(tmp_path: Path) -> None:
    with rollout(tmp_path, episode, count=4, batch=2, eta=0) as (executor, journal):
        train(executor, journal)
        first, second = executor.stats(), executor.stats()
        assert first == second
        assert first["rollout/groups/complete"] == 4 and first["rollout/groups_queued_seconds"] > 0


def test_two_hundred_steps_keep_nothing_in_memory(tmp_path: Path) -> None:
    def alive() -> int:
        gc.collect()
        return sum(type(thing) is Trajectory for thing in gc.get_objects())

    before = alive()
    with rollout(tmp_path, episode, count=400, batch=2, eta=1, n_samples=2) as (executor, journal):
        version = 0
        while (batch := executor.next_batch(version)) is not None:
            journal.record_batch(version, batch.trajectory_ids, batch.seed)
            journal.finish_batch(version, "d")
            version += 1
            Serving.version = version
            executor.set_version(version)
            if version % 50 == 0:
                journal.record_checkpoint(version, "d", f"step_{version}")
                journal.prune(version)
                # The batch in hand, and at most (eta + 1) batches of two groups of two.
                assert alive() - before <= (1 + 1 + 1) * 4
        assert version == 200
        with journal.transaction() as db:
            assert db.execute("SELECT count(*) FROM trajectory WHERE blob IS NOT NULL").fetchone() == (0,)
