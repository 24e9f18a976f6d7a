"""Held-out episodes: what a failure counts, and what ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from rollout_helpers import trajectory

from areal.evaluation import evaluate
from areal.inference.backend import BackendError
from areal.rollout.trajectory import Trajectory

Episode = Callable[[], Awaitable[list[Trajectory]]]


def scoring(reward: float) -> Episode:
    async def episode() -> list[Trajectory]:
        return [trajectory(reward=reward)]

    return episode


def raising(error: Exception) -> Episode:
    async def episode() -> list[Trajectory]:
        raise error

    return episode


async def sleeping() -> list[Trajectory]:
    await asyncio.sleep(60)
    return []


def run(*episodes: Episode):
    return asyncio.run(evaluate(episodes, episode_timeout=0.2, max_concurrent=None))


def test_failed_and_late_episodes_score_zero_and_are_counted_by_name() -> None:
    result = run(scoring(1.0), scoring(0.5), raising(KeyError("answer")), sleeping)
    assert result.reward == pytest.approx(1.5 / 4) and result.scored == 2
    assert result.failures == {"KeyError": 1, "TimeoutError": 1}
    assert result.metrics()["eval/failed"] == 2


def test_a_dead_engine_is_no_bad_answer() -> None:
    with pytest.raises(BackendError, match="gone"):
        run(scoring(1.0), raising(BackendError("gone")))


def test_when_all_fail_the_last_traceback_is_shown() -> None:
    with pytest.raises(RuntimeError, match="(?s)all 2 held-out episodes failed.*KeyError: 'answer'") as caught:
        run(raising(KeyError("answer")), raising(KeyError("answer")))
    assert "Traceback" in str(caught.value)


def test_the_number_in_flight_is_reported_down_to_zero() -> None:
    counts: list[int] = []
    asyncio.run(evaluate([scoring(1.0)] * 5, episode_timeout=1.0, max_concurrent=2, on_live_change=counts.append))
    assert counts == [2, 2, 2, 2, 1, 0]
