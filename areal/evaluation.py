"""Reward on held-out prompts, through the same workflow and engine, outside the journal and the gate."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from areal.inference.backend import BackendError
from areal.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationResult:
    """Mean reward over all episodes, how many ended with one, and how many failed, by reason."""

    reward: float
    scored: int
    failures: dict[str, int]

    def metrics(self) -> dict[str, float]:
        return {
            "eval/reward": self.reward,
            "eval/episodes": float(self.scored),
            "eval/failed": float(sum(self.failures.values())),
        }


async def evaluate(
    episodes: Sequence[Callable[[], Awaitable[list[Trajectory]]]],
    *,
    episode_timeout: float,
    max_concurrent: int | None,
    on_live_change: Callable[[int], None] = lambda count: None,
) -> EvaluationResult:
    """Run held-out episodes concurrently; the reward of an episode is that of its last trajectory.

    A failed or late episode is counted by its exception's name and scores 0: leaving it out would flatter the mean.

    Args:
        episode_timeout: seconds after which one episode is cut.
        max_concurrent: episodes in flight; None runs all at once.
        on_live_change: called with the number of episodes in flight whenever it changes.

    Raises:
        BackendError: the engine failed.
        RuntimeError: no episode ended with a reward; the message ends with the traceback of the last failure.
    """
    limit = min(max_concurrent or len(episodes), len(episodes))
    room, waiting = asyncio.Semaphore(limit), len(episodes)
    rewards: list[float] = []
    failures: Counter[str] = Counter()
    last_failure: list[BaseException] = []

    async def run(episode: Callable[[], Awaitable[list[Trajectory]]]) -> None:
        nonlocal waiting
        async with room:
            try:
                trajectories = await asyncio.wait_for(episode(), episode_timeout)
                rewards.append(trajectories[-1].reward)
            except BackendError:
                raise
            except Exception as error:  # user code may raise anything; every kind is counted and reported
                failures[type(error).__name__] += 1
                last_failure[:] = [error]
            waiting -= 1
            on_live_change(min(limit, waiting))

    on_live_change(limit)
    await asyncio.gather(*(run(episode) for episode in episodes))
    if failures:
        logger.warning("held-out episodes failed: %s; last: %r", dict(failures), last_failure[0])
    if not rewards:
        last = "".join(traceback.format_exception(last_failure[0]))
        raise RuntimeError(f"all {len(episodes)} held-out episodes failed, the last with\n{last}")
    return EvaluationResult(sum(rewards) / len(episodes), len(rewards), dict(failures))
