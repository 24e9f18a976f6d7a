from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_helpers import Serving, places, rollout, rows, train, trajectory
from rollout_helpers import episode as plain_episode

from areal.rollout.episodes import EpisodeTask
from areal.rollout.errors import ExecutorError, RejectedPrompt, RolloutStalled, StalenessViolation, WorkflowFailure
from areal.rollout.journal import Journal
from areal.rollout.recovery import audit, recover
from areal.rollout.trajectory import Trajectory


def test_batches_are_whole_groups_in_prompt_order(tmp_path: Path) -> None:
    async def episode(task: EpisodeTask) -> list[Trajectory]:
        await asyncio.sleep(0.02 * random.Random(task.episode_id).random())
        return [trajectory(reward=10 * task.prompt.place + task.sample, turn=turn) for turn in range(2)]

    with rollout(tmp_path, episode, count=6, batch=3, eta=0, n_samples=3) as (executor, journal):
        batches = train(executor, journal, steps=1)
        assert [group.place for group in batches[0].groups] == [0, 1, 2]
        assert [t.reward for t in batches[0].groups[1].trajectories] == [10, 10, 11, 11, 12, 12]
        first = batches[0].trajectories[0]
        assert (first.prompt_id, first.group_id, first.episode_id, first.id) == ("q0", "0.0", "0.0.0", "0.0.0/0")
        second = executor.next_batch(1)
        assert second is not None and second.seed != batches[0].seed


def test_concurrency_is_bounded_and_admission_is_in_order(tmp_path: Path) -> None:
    live, most, started = 0, 0, []

    async def episode(task: EpisodeTask) -> Trajectory:
        nonlocal live, most
        started.append(task.order)
        live += 1
        most = max(most, live)
        await asyncio.sleep(0.01)
        live -= 1
        return trajectory()

    with rollout(tmp_path, episode, count=12, batch=4, eta=4, max_concurrent=5) as (executor, journal):
        train(executor, journal, steps=3)
    assert most == 4, "two groups of two fit into five"
    assert started == [(place, sample) for place in range(12) for sample in range(2)]


def test_max_concurrent_must_hold_a_group(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="max_concurrent is 1"),
        rollout(tmp_path, plain_episode, max_concurrent=1),
    ):
        pass


@pytest.mark.parametrize(
    ("how", "reason", "runs"),
    [
        ("raise", "error:ZeroDivisionError", 3),
        ("hang", "timeout", 3),
        ("ignore cancellation", "timeout", 3),
        ("not finite", "invalid_trajectory", 3),
        ("wrong type", "invalid_trajectory", 3),
        ("same turn twice", "invalid_trajectory", 3),
        ("old tokens", "too_old", 3),
        ("reject", "prompt_too_long", 1),
        ("none", "empty", 1),
        ("no list", "empty", 1),
    ],
)
def test_each_failure_has_a_name_and_ends_its_prompt(tmp_path: Path, how: str, reason: str, runs: int) -> None:
    tried: list[str] = []
    forever: list[asyncio.Event] = []

    async def misbehave() -> Any:
        if how == "raise":
            return 1 / 0
        if how == "hang":
            await asyncio.Event().wait()
        if how == "ignore cancellation":
            forever.append(asyncio.Event())
            while not forever[0].is_set():
                try:
                    await forever[0].wait()
                except asyncio.CancelledError:
                    continue
        if how == "reject":
            raise RejectedPrompt("prompt_too_long", "the prompt has 9 tokens, the model 8")
        bad = trajectory()
        bad.logprobs[2] = float("nan")
        return {
            "not finite": bad,
            "wrong type": "text",
            "same turn twice": [trajectory(), trajectory()],
            "old tokens": trajectory(version=4),
            "none": None,
            "no list": [],
        }[how]

    version = 5 if how == "old tokens" else 0

    async def episode(task: EpisodeTask) -> Any:
        if task.prompt.id == "q1":
            if task.sample == 0:
                tried.append(task.group_id)
                return await misbehave()
            await asyncio.sleep(0.2)
        return trajectory()

    options = {"episode_timeout": 0.3, "version": version, "max_attempts": 3}
    with rollout(tmp_path, episode, count=4, batch=3, eta=0, **options) as (executor, journal):
        batch = executor.next_batch(version)
        assert batch is not None and [group.place for group in batch.groups] == [0, 2, 3]
        assert journal.counts()[f"prompt/dropped/{reason}"] == 1
        assert len(tried) == runs and len(set(tried)) == runs, "each attempt is a new group"
        stats = executor.stats()
        assert stats[f"rollout/episodes/{reason.replace(':', '/')}"] == runs
        assert stats["rollout/retries"] == runs - 1
        assert stats["rollout/running"] == 0 and stats["rollout/episodes"] == 0
        if forever:
            forever[0].set()


def test_a_failed_episode_cancels_its_group_and_the_retry_is_whole(tmp_path: Path) -> None:
    cancelled: list[str] = []

    async def episode(task: EpisodeTask) -> Trajectory:
        if task.prompt.id == "q0" and task.attempt == 0:
            if task.sample == 1:
                raise OSError("once")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(task.episode_id)
                raise
        return trajectory()

    with rollout(tmp_path, episode, count=2, batch=2, n_samples=3) as (executor, _journal):
        batch = executor.next_batch(0)
        assert batch is not None
        assert [group.group_id for group in batch.groups] == ["0.1", "1.0"]
        assert [len(group.trajectories) for group in batch.groups] == [3, 3]
        assert sorted(cancelled) == ["0.0.0", "0.0.2"]


def test_group_filter_drops_by_name(tmp_path: Path) -> None:
    async def episode(task: EpisodeTask) -> Trajectory:
        return trajectory(reward=float(task.sample * (task.prompt.place % 2)))

    def differs(group: list[Trajectory]) -> bool:
        return len({t.reward for t in group}) > 1

    with rollout(tmp_path, episode, count=8, batch=2, eta=0, group_filter=differs) as (executor, journal):
        batch = executor.next_batch(0)
        assert batch is not None and [group.place for group in batch.groups] == [1, 3]
        assert journal.counts()["prompt/dropped/filtered"] == 2
        assert journal.counts()["trajectory/dropped/filtered"] == 4


def test_dynamic_batch_size_counts_rejections(tmp_path: Path) -> None:
    async def episode(task: EpisodeTask) -> Trajectory | None:
        return trajectory() if task.prompt.place in (1, 6) else None

    with rollout(tmp_path, episode, count=8, batch=4, eta=0, dynamic_bs=True) as (executor, _journal):
        batch = executor.next_batch(0)
        assert batch is not None
        assert ([group.place for group in batch.groups], batch.rejected) == ([1], 3)
        assert executor.stats()["rollout/leased"] == 4


def test_dynamic_batch_of_rejections_alone_is_no_step(tmp_path: Path) -> None:
    async def episode(task: EpisodeTask) -> Trajectory | None:
        return trajectory() if task.prompt.place == 7 else None

    with rollout(tmp_path, episode, count=8, batch=2, eta=0, dynamic_bs=True) as (executor, journal):
        assert places(train(executor, journal)) == [7]


def test_always_failing_workflow_stops_the_run_with_its_traceback(tmp_path: Path) -> None:
    async def episode(task: EpisodeTask) -> Trajectory:
        raise KeyError("answer")

    with rollout(tmp_path, episode, count=100, batch=4) as (executor, _):
        with pytest.raises(WorkflowFailure, match="8 groups in a row failed") as caught:
            executor.next_batch(0)
        assert caught.value.failures == 8
        assert 'raise KeyError("answer")' in str(caught.value) and "KeyError: 'answer'" in str(caught.value)


def test_small_dataset_of_failures_is_no_success(tmp_path: Path) -> None:
    async def episode(task: EpisodeTask) -> Trajectory:
        raise RejectedPrompt("missing_column", "the row has no 'question'")

    with rollout(tmp_path, episode, count=3) as (executor, _):
        with pytest.raises(
            WorkflowFailure, match=r"dropped by reason: \{'missing_column': 3\}(.|\n)*no 'question'"
        ) as caught:
            executor.next_batch(0)
        assert caught.value.failures == 0


def test_occasional_failures_do_not_stop_the_run(tmp_path: Path) -> None:
    async def episode(task: EpisodeTask) -> Trajectory:
        if task.prompt.place % 2 and task.attempt == 0:
            raise ValueError("odd")
        return trajectory()

    with rollout(tmp_path, episode, count=40, batch=2, eta=1, max_concurrent=2) as (executor, journal):
        assert sorted(places(train(executor, journal))) == list(range(40))


def test_fatal_error_stops_at_once(tmp_path: Path) -> None:
    async def episode(task: EpisodeTask) -> Trajectory:
        raise ConnectionError("the engine is gone")

    with (
        rollout(tmp_path, episode, count=100, batch=50, fatal_errors=(ConnectionError,)) as (executor, _journal),
        pytest.raises(ExecutorError, match="the engine is gone"),
    ):
        executor.next_batch(0)


def test_errors_around_the_workflow_surface(tmp_path: Path) -> None:
    def broken_filter(group: list[Trajectory]) -> bool:
        raise LookupError("filter")

    def broken_hook(count: int) -> None:
        raise LookupError("hook")

    for name, options in (("filter", {"group_filter": broken_filter}), ("hook", {"on_live_change": broken_hook})):
        with rollout(tmp_path / name, plain_episode, stop_reason="test", **options) as (executor, _):
            began = time.monotonic()
            with pytest.raises(ExecutorError, match=f"LookupError: {name}"):
                executor.next_batch(0)
            assert time.monotonic() - began < 4


def test_a_reported_failure_surfaces(tmp_path: Path) -> None:
    async def episode(task: EpisodeTask) -> Trajectory:
        await asyncio.sleep(60)
        return trajectory()

    with rollout(tmp_path, episode, episode_timeout=60) as (executor, _):
        threading.Timer(0.1, executor.fail, [RuntimeError("generation thread died")]).start()
        with pytest.raises(ExecutorError, match="generation thread died"):
            executor.next_batch(0)


def test_blocked_loop_is_named(tmp_path: Path) -> None:
    release = threading.Event()

    async def episode(task: EpisodeTask) -> Trajectory:
        release.wait(20)
        return trajectory()

    with rollout(tmp_path, episode, episode_timeout=0.1, stall_margin=0.2) as (executor, _):
        with pytest.raises(
            RolloutStalled, match=r"waited for 2 groups: 0 complete, running \[0, 1, 2, 3\](.|\n)*release.wait"
        ):
            executor.next_batch(0)
        release.set()


def test_live_count_is_told_after_the_admissions_that_follow(tmp_path: Path) -> None:
    told: list[int] = []
    with rollout(
        tmp_path, plain_episode, count=6, batch=1, eta=0, n_samples=2, max_concurrent=2, on_live_change=told.append
    ) as (executor, journal):
        train(executor, journal)
    assert told[0] == 2 and told[-1] == 0
    assert all(count in (0, 1, 2) for count in told)


def test_stop_leaves_no_thread_and_gives_leases_back(tmp_path: Path) -> None:
    async def episode(task: EpisodeTask) -> Trajectory:
        if task.prompt.place == 0:
            return trajectory()
        await asyncio.sleep(60)
        return trajectory()

    before = set(threading.enumerate())
    with rollout(tmp_path, episode, count=9, eta=0, episode_timeout=60, stop_reason="signal") as (executor, journal):
        while journal.counts().get("prompt/complete", 0) < 1:
            time.sleep(0.01)
        executor.stop("signal")
        executor.stop("signal")
        assert journal.counts() == {"prompt/complete": 1, "prompt/pending": 1, "trajectory/complete": 2}
        with pytest.raises(ExecutorError, match="stopped: signal"):
            executor.next_batch(0)
        audit(journal)
    assert set(threading.enumerate()) == before


def test_versions_are_asserted_on_every_batch(tmp_path: Path) -> None:
    async def from_the_future(task: EpisodeTask) -> Trajectory:
        return trajectory(version=1)

    with (
        rollout(tmp_path, from_the_future, stop_reason="test") as (executor, _),
        pytest.raises(StalenessViolation, match="versions 1 to 1; the step trains -1 to 0"),
    ):
        executor.next_batch(0)


def test_recovered_groups_are_used_first(tmp_path: Path) -> None:
    with rollout(tmp_path, plain_episode, count=12, batch=2, eta=2, stop_reason="signal") as (executor, journal):
        train(executor, journal, steps=1)
        while journal.counts().get("prompt/complete", 0) < 6:
            time.sleep(0.01)
    journal = Journal.open(tmp_path, "config")
    assert recover(journal, 1).version == 1
    journal.close()
    with rollout(tmp_path, plain_episode, count=12, batch=2, eta=2, version=1) as (executor, journal):
        assert executor.stats()["rollout/recovered"] == 6
        batches = train(executor, journal, version=1, steps=3)
        assert places(batches) == [2, 3, 4, 5, 6, 7]
        assert {t.oldest_version for batch in batches[:2] for t in batch.trajectories} == {0}
    journal = Journal.open(tmp_path, "config")
    audit(journal, finished=True)
    journal.close()


def test_recovered_groups_that_are_too_old_are_sampled_again(tmp_path: Path) -> None:
    with rollout(tmp_path, plain_episode, count=6, batch=2, eta=2, stop_reason="signal") as (executor, journal):
        while journal.counts().get("prompt/complete", 0) < 6:
            time.sleep(0.01)
        train(executor, journal, steps=1)
    with rollout(tmp_path, plain_episode, count=6, batch=2, eta=0, version=1) as (executor, journal):
        assert executor.stats()["rollout/abandoned/too_old"] == 4
        batch = executor.next_batch(1)
        assert batch is not None and [group.group_id for group in batch.groups] == ["2.1", "3.1"]
        assert journal.counts()["trajectory/dropped/too_old"] == 8


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 3),
    eta=st.integers(0, 4),
    count=st.integers(1, 14),
    dynamic_bs=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_runs_with_failures_rejections_tails_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, batch: int, eta: int, count: int, dynamic_bs: bool, seed: int
) -> None:
    """Bound on every token, one terminal state per prompt, no trajectory twice, no hang: on real threads."""
    folder, rng = tmp_path_factory.mktemp("run"), random.Random(seed)

    async def episode(task: EpisodeTask) -> Trajectory | None:
        draw = random.Random(f"{seed} {task.episode_id}")
        await asyncio.sleep(0.05 if draw.random() < 0.1 else 0.003 * draw.random())
        fate = draw.random()
        if fate < 0.03:
            raise ValueError("unlucky")
        return None if fate < 0.12 else trajectory()

    version, trained = 0, []
    for life in range(3):
        last = life == 2
        with rollout(
            folder, episode, count=count, batch=batch, eta=eta, dynamic_bs=dynamic_bs, shuffle=True, version=version,
            max_concurrent=8, max_attempts=4, stop_reason="run_ended" if last else "signal",
        ) as (executor, journal):  # fmt: skip
            steps = rng.randint(0, 4)
            while last or steps:
                steps -= 1
                try:
                    taken = executor.next_batch(version)
                except WorkflowFailure as failure:
                    assert "no prompt gave anything" in str(failure)
                    break
                if taken is None:
                    break
                for sample in taken.trajectories:
                    assert 0 <= version - sample.oldest_version <= eta
                trained += [(group.place, sample.id) for group in taken.groups for sample in group.trajectories]
                journal.record_batch(version, taken.trajectory_ids, taken.seed)
                journal.finish_batch(version, str(version))
                version += 1
                Serving.version = version
                executor.set_version(version)
    assert len(trained) == len(set(trained))
    journal = Journal.open(folder, "config")
    audit(journal, finished=True)
    counts = journal.counts()
    assert counts.get("prompt/trained", 0) == len({place for place, _ in trained})
    assert counts.get("prompt/trained", 0) + counts.get("prompt/dropped", 0) == count
    assert not any(name.startswith("prompt/dropped/run_ended") for name in counts)
    journal.close()


def test_rows_reach_the_workflow(tmp_path: Path) -> None:
    seen: list[int] = []

    async def episode(task: EpisodeTask) -> Trajectory:
        seen.append(task.prompt.data["question"])
        return trajectory()

    with rollout(tmp_path, episode, rows=rows(2), batch=2, n_samples=1) as (executor, journal):
        train(executor, journal)
    assert seen == [0, 1] and os.path.exists(tmp_path / "journal.db")
