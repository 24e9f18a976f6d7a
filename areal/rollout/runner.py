"""Episodes in flight: started, cut at their deadline, and handed over when they end. Belongs to the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from areal.rollout.episodes import EpisodeTask, Outcome, RunningEpisode, RunningGroup, claim
from areal.rollout.errors import InvalidTrajectory
from areal.rollout.journal import episode_id
from areal.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)

CANCEL_GRACE = 1.0
"""Seconds that a cancelled episode has to end before it is left behind."""

RunEpisode = Callable[[EpisodeTask], Awaitable[Trajectory | list[Trajectory] | None]]


class EpisodeRunner:
    """Runs workflows as tasks of the current loop; sets ``wake`` when one has ended.

    Args:
        run_episode: the workflow. timeout: seconds before an episode is cut. lineage: of the run, now.
    """

    def __init__(
        self, run_episode: RunEpisode, timeout: float, lineage: Callable[[], int], wake: asyncio.Event
    ) -> None:
        self._run_episode, self._timeout, self._lineage, self._wake = run_episode, timeout, lineage, wake
        self._live: dict[str, RunningEpisode] = {}
        self._ended: list[tuple[RunningEpisode, Outcome]] = []

    def __len__(self) -> int:
        """Episodes in flight, with those that ended and were not collected."""
        return len(self._live)

    def start(self, group: RunningGroup) -> None:
        """Start all episodes of a group."""
        lease, loop = group.lease, asyncio.get_running_loop()
        for sample in range(group.size):
            name, order = episode_id(lease.group_id, sample), (group.prompt.place, sample)
            task = EpisodeTask(group.prompt, sample, lease.attempts, lease.group_id, name, order)
            run = RunningEpisode(group, task, loop.create_task(self._call(task), name=f"episode {name}"))
            run.deadline = loop.call_later(self._timeout, self._cut, run, "timeout")
            run.future.add_done_callback(partial(self._end, run))
            self._live[name] = run

    def collect(self) -> list[tuple[RunningEpisode, Outcome]]:
        """Episodes that ended since the last call, and what came of them."""
        ended, self._ended = self._ended, []
        for run, _ in ended:
            del self._live[run.task.episode_id]
        return ended

    def cancel(self, group: RunningGroup) -> None:
        """Cut what still runs of a group."""
        for run in [run for run in self._live.values() if run.group is group]:
            self._cut(run, "cancelled")

    async def cancel_all(self) -> None:
        """Cut everything and wait for it to end, for a grace."""
        runs = list(self._live.values())
        for run in runs:
            self._cut(run, "cancelled")
        if runs:
            _, left = await asyncio.wait([run.future for run in runs], timeout=CANCEL_GRACE)
            if left:
                logger.warning("ignored their cancellation: %s", ", ".join(sorted(task.get_name() for task in left)))

    async def _call(self, task: EpisodeTask) -> list[Trajectory]:
        result = await self._run_episode(task)
        try:
            return claim(result, task, self._lineage())
        except ValueError as error:
            raise InvalidTrajectory(str(error)) from error

    def _cut(self, run: RunningEpisode, why: str) -> None:
        if run.cut is None and not run.closed:
            run.cut = why
            run.future.cancel()
            self._set_deadline(run, asyncio.get_running_loop().call_later(CANCEL_GRACE, self._end, run))

    def _end(self, run: RunningEpisode, _future: object = None) -> None:
        """Hand over an episode that ended, or that ignored its cancellation and is left behind; once."""
        if run.closed:
            return
        run.closed = True
        self._set_deadline(run, None)
        outcome: Outcome
        if not run.future.done():
            outcome = TimeoutError(f"episode {run.task.episode_id} ignored its cancellation")
        elif run.future.cancelled():
            outcome = asyncio.CancelledError()
        else:
            outcome = run.future.exception() or run.future.result()
        self._ended.append((run, outcome))
        self._wake.set()

    def _set_deadline(self, run: RunningEpisode, deadline: asyncio.TimerHandle | None) -> None:
        if run.deadline is not None:
            run.deadline.cancel()
        run.deadline = deadline
