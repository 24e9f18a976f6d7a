"""Concurrent episodes between the dataset and the training loop.

One scheduler coroutine on the loop owns everything that runs: ended episodes come to it, it settles their groups,
writes the journal (on a thread of its own, so that no flush to disk blocks generation), admits new groups, and wakes
the trainer. Nothing polls; every wait is for an event and has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from areal.rollout.episodes import Batch, Group, Outcome, RunningEpisode, RunningGroup, step_seed
from areal.rollout.errors import (
    ExecutorError,
    InvalidTrajectory,
    RejectedPrompt,
    RolloutStalled,
    StalenessViolation,
    WorkflowFailure,
)
from areal.rollout.journal import Journal
from areal.rollout.loop import LoopThread
from areal.rollout.prompts import PromptSource
from areal.rollout.runner import CANCEL_GRACE, EpisodeRunner, RunEpisode
from areal.rollout.staleness import StalenessGate
from areal.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RolloutExecutor:
    """Runs ``n_samples`` episodes per prompt and hands out batches of complete groups within the age bound.

    Args:
        loop: where episodes run. It belongs to the caller, who stops it after the executor.
        journal: the durable record; the executor leases, completes, returns and drops prompts in it.
        source: the prompts. gate: admission and age, with the batch size and the number of steps.
        run_episode: the workflow: samples one trajectory or several, ``None`` or ``[]`` to reject the prompt.
        n_samples: episodes per group. max_concurrent: episodes in flight at once, at least ``n_samples``.
        episode_timeout: seconds after which an episode is cut, reason ``timeout``.
        max_attempts: failures of a prompt before it is dropped with the reason of the last.
        group_filter: False drops a complete group, reason ``filtered``.
        seed: of the run, for `Batch.seed`.
        fatal_errors: exceptions of an episode that stop the run at once, such as a dead engine.
        on_live_change: called on the loop with the number of running episodes, after each round of ends and the
            admissions that follow from them.
        stall_margin: seconds beyond ``episode_timeout`` without any event before `next_batch` gives up.

    Nothing runs before `start`.
    """

    def __init__(
        self,
        *,
        loop: LoopThread,
        journal: Journal,
        source: PromptSource,
        gate: StalenessGate,
        run_episode: RunEpisode,
        n_samples: int,
        max_concurrent: int,
        episode_timeout: float,
        max_attempts: int = 3,
        group_filter: Callable[[list[Trajectory]], bool] | None = None,
        seed: int = 0,
        fatal_errors: tuple[type[BaseException], ...] = (),
        on_live_change: Callable[[int], None] = lambda count: None,
        stall_margin: float = 30.0,
    ) -> None:
        for name, value in (("n_samples", n_samples), ("max_attempts", max_attempts)):
            if value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")
        if max_concurrent < n_samples:
            raise ValueError(
                f"max_concurrent is {max_concurrent}, but one group needs n_samples = {n_samples} episodes"
            )
        self._journal, self._source, self._gate = journal, source, gate
        self._group_filter, self._on_live_change = group_filter, on_live_change
        self._n_samples, self._max_concurrent, self._max_attempts = n_samples, max_concurrent, max_attempts
        self._episode_timeout, self._stall_margin = episode_timeout, stall_margin
        self._seed, self._fatal_errors = seed, fatal_errors
        self._failure_limit = 2 * max(gate.batch_size, max_attempts)

        self._changed = threading.Condition()  # guards the gate and every field below that both threads use
        self._complete: dict[int, Group] = {}
        self._failure: BaseException | None = None
        self._exhausted = False
        self._moved = time.monotonic()
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._seconds: defaultdict[str, float] = defaultdict(float)

        # Owned by the loop.
        self._wake = asyncio.Event()
        self._runner = EpisodeRunner(run_episode, episode_timeout, lambda: journal.lineage, self._wake)
        self._failed: list[int] = []  # places of the groups that failed since an episode last succeeded
        self._last_traceback = ""
        self._scheduler: asyncio.Task[None] | None = None
        self._stopped = False

        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._loop = loop
        loop.on_crash = self.fail

    # Called by the training loop

    def start(self, version: int = 0) -> None:
        """Begin at ``version`` completed steps, first with the complete groups that the journal still has."""
        known = {place: Group(place, group_id, found) for place, group_id, found in self._journal.complete_groups()}
        with self._changed:
            unfit = self._gate.rebase(version, {place: oldest(group.trajectories) for place, group in known.items()})
            for place in unfit:
                self._journal.abandon_group(known.pop(place).group_id, "too_old")
            self._totals["recovered"], self._totals["abandoned/too_old"] = len(known), len(unfit)
            self._complete = known

        async def begin() -> None:
            self._scheduler = asyncio.create_task(self._schedule(), name="rollout scheduler")
            self._scheduler.add_done_callback(self._scheduler_ended)
            self._wake.set()

        self._loop.run(begin(), 10.0, "the rollout scheduler to start")

    def next_batch(self, version: int) -> Batch | None:
        """Wait for the batch of the step that starts at ``version``; None when no step is left to make.

        Raises:
            WorkflowFailure: the workflow cannot make progress.
            ExecutorError: the executor itself, or something it relies on, failed.
            RolloutStalled: nothing has happened for longer than an episode may take.
        """
        began = time.monotonic()
        with self._changed:
            if version != self._gate.version:
                raise ValueError(
                    f"the gate is at version {self._gate.version}, not {version}; call set_version after a step"
                )
            while True:
                self._raise_failure()
                places = self._gate.select(final=self._exhausted and not self._gate.running)
                if places is None:
                    self._await_change(began)
                elif not places:
                    self._check_anything_trained()
                    return None
                elif not any(place in self._complete for place in places):
                    self._gate.discard(places)
                    self._loop.call(self._wake.set)
                else:
                    break
            groups = [self._complete.pop(place) for place in self._gate.take(places)]
            now = time.monotonic()
            self._totals["batches"] += 1
            self._seconds["trainer_waited"] += now - began
            self._seconds["groups_queued"] += sum(now - group.completed for group in groups)
        self._check_age(groups, version)
        return Batch(version, groups, len(places) - len(groups), step_seed(self._seed, version), now - began)

    def set_version(self, version: int) -> None:
        """The step is done and the backend serves its weights: open the gate."""
        with self._changed:
            self._gate.advance(version)
        self._loop.call(self._wake.set)

    def fail(self, error: BaseException) -> None:
        """Stop the run because of ``error``: `next_batch` raises it. For whatever the rollout relies on."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def stats(self) -> dict[str, float]:
        """Gauges of now, and totals since `start` that reading does not reset."""
        with self._changed:
            gauges = {
                "rollout/running": len(self._gate.running),
                "rollout/waiting": len(self._gate.waiting),
                "rollout/capacity": self._gate.capacity(),
                "rollout/episodes": len(self._runner),
            }
            totals = {f"rollout/{name.replace(':', '/')}": count for name, count in self._totals.items()}
            seconds = {f"rollout/{name}_seconds": total for name, total in self._seconds.items()}
            return gauges | totals | seconds

    def stop(self, reason: str = "run_ended", timeout: float = 10.0) -> None:
        """Cancel what runs, and record it. Idempotent.

        Args:
            reason: ``run_ended`` drops every prompt that is not trained; any other gives the leases back, for a resume.
        """
        if self._stopped:
            return
        self._stopped = True
        self.fail(ExecutorError(f"the executor was stopped: {reason}"))
        try:
            if self._loop.alive:
                self._loop.run(self._cancel_all(), timeout, "episodes to be cancelled")
        finally:
            self._writer.shutdown()
            if reason == "run_ended":
                self._journal.end_run(reason)
            else:
                self._journal.interrupt(reason)

    # The trainer's side of the lock

    def _raise_failure(self) -> None:
        if isinstance(self._failure, WorkflowFailure | ExecutorError):
            raise self._failure
        if self._failure is not None:
            raise ExecutorError(
                f"the rollout failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def _await_change(self, began: float) -> None:
        patience = self._episode_timeout + CANCEL_GRACE + self._stall_margin
        since = max(began, self._moved)
        left = since + patience - time.monotonic()
        if left <= 0:
            gate = self._gate
            raise RolloutStalled(
                f"nothing happened for {patience:.0f} s while the step at version {gate.version} waited for "
                f"{gate.batch_size} groups: {len(gate.waiting)} complete, running {gate.running[:16]}, must be in this "
                f"step {gate.must_train_now()}; the loop is at\n{self._loop.stack()}"
            )
        self._changed.wait(left)

    def _check_anything_trained(self) -> None:
        counts = self._journal.counts()
        if self._gate.steps_left and not self._totals["batches"] and not counts.get("prompt/trained"):
            reasons = {name.split("/", 2)[2]: n for name, n in counts.items() if name.startswith("prompt/dropped/")}
            last = f"the last failure was\n{self._last_traceback}" if self._last_traceback else ""
            raise WorkflowFailure(f"no prompt gave anything to train; dropped by reason: {reasons}", 0, last)

    def _check_age(self, groups: list[Group], version: int) -> None:
        first = version - self._gate.max_head_offpolicyness
        for trajectory in [trajectory for group in groups for trajectory in group.trajectories]:
            old, new = trajectory.oldest_version, trajectory.newest_version
            if old is not None and new is not None and not first <= old <= new <= version:
                raise StalenessViolation(
                    f"trajectory {trajectory.id} has versions {old} to {new}; the step trains {first} to {version}"
                )

    # The scheduler, on the loop

    async def _schedule(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            ended = self._runner.collect()
            settled = [group for run, outcome in ended if (group := self._close(run, outcome)) is not None]
            if settled:
                verdicts = await self._write(self._record, settled)
                with self._changed:
                    for group, verdict in zip(settled, verdicts, strict=True):
                        self._apply(group, *verdict)
            await self._admit()
            self._on_live_change(len(self._runner))
            with self._changed:
                self._moved = time.monotonic()
                self._changed.notify_all()

    def _scheduler_ended(self, scheduler: asyncio.Task[None]) -> None:
        if not scheduler.cancelled() and (error := scheduler.exception()) is not None:
            self.fail(error)

    async def _write(self, function: Callable[..., T], *args: object) -> T:
        return await self._loop.loop.run_in_executor(self._writer, function, *args)

    def _close(self, run: RunningEpisode, outcome: Outcome) -> RunningGroup | None:
        """Account for an ended episode; returns its group when it was the last one."""
        group = run.group
        group.ended += 1
        reason, error = self._verdict(run, outcome)
        with self._changed:
            self._totals[f"episodes/{reason or 'complete'}"] += 1
            self._seconds["episodes"] += time.monotonic() - run.started
        if reason is None:
            assert isinstance(outcome, list)
            group.results[run.task.sample] = outcome
            self._failed.clear()
        elif reason != "cancelled":
            self._fail_group(group, reason, error)
        return group if group.ended == group.size else None

    def _verdict(self, run: RunningEpisode, outcome: Outcome) -> tuple[str | None, BaseException | None]:
        """The reason for which an episode failed, None if it did not, and what it raised."""
        if run.cut == "timeout":
            return run.cut, TimeoutError(f"episode_timeout of {self._episode_timeout} s has passed")
        if run.cut is not None:
            return run.cut, None
        if isinstance(outcome, RejectedPrompt):
            return outcome.reason, outcome
        if isinstance(outcome, InvalidTrajectory):
            return "invalid_trajectory", outcome
        if isinstance(outcome, BaseException):
            return f"error:{type(outcome).__name__}", outcome
        admitted, age = self._gate.admitted_at(run.group.prompt.place), oldest(outcome)
        if age is not None and age < admitted:
            return "too_old", InvalidTrajectory(
                f"a token of version {age} in a group admitted at version {admitted}: the backend serves older weights "
                "than set_version was told"
            )
        return (None, None) if outcome else ("empty", None)

    def _fail_group(self, group: RunningGroup, reason: str, error: BaseException | None) -> None:
        decided = isinstance(error, RejectedPrompt) or reason == "empty"
        if group.failure is None:
            group.failure, group.hopeless = reason, decided
            self._runner.cancel(group)
            if not decided:
                self._failed.append(group.prompt.place)
        if isinstance(error, self._fatal_errors):
            raise error
        log = logger.info if self._totals[f"episodes/{reason}"] > 1 else logger.warning
        log("episode of prompt %s failed: %s%s", group.prompt.id, reason, f": {error}" if error else "")
        self._last_traceback = "".join(traceback.format_exception(error)) if error else self._last_traceback
        # Many prompts, not one: a single bad prompt uses up its attempts and is dropped.
        if len(self._failed) >= self._failure_limit and len(set(self._failed)) >= max(2, self._gate.batch_size):
            raise WorkflowFailure(
                f"{len(self._failed)} groups in a row failed and no episode succeeded, the last with {reason}",
                len(self._failed),
                self._last_traceback,
            )

    def _record(self, settled: list[RunningGroup]) -> list[tuple[str, str | None]]:
        """Decide what becomes of settled groups and write it, on the journal's thread."""
        verdicts: list[tuple[str, str | None]] = []
        for group in settled:
            if group.failure is not None:
                again = not group.hopeless and group.lease.attempts + 1 < self._max_attempts
                verdicts.append(("returned" if again else "dropped", group.failure))
            elif self._group_filter is not None and not self._group_filter(group.sampled):
                verdicts.append(("dropped", "filtered"))
            else:
                verdicts.append(("complete", None))
        with self._journal.transaction():
            for group, (verdict, reason) in zip(settled, verdicts, strict=True):
                if reason is None:
                    self._journal.complete_group(group.lease.group_id, group.sampled)
                elif verdict == "dropped":
                    self._journal.drop_prompt(group.lease.group_id, reason, group.sampled)
                else:
                    self._journal.return_prompt(group.lease.group_id, reason, group.sampled)
        return verdicts

    def _apply(self, group: RunningGroup, verdict: str, reason: str | None) -> None:
        place = group.prompt.place
        self._totals[f"groups/{verdict}" + (f"/{reason}" if reason else "")] += 1
        self._seconds["groups"] += time.monotonic() - group.admitted
        if verdict == "complete":
            self._complete[place] = Group(place, group.lease.group_id, group.sampled)
            self._gate.complete(place, oldest(group.sampled))
        elif verdict == "dropped":
            self._gate.reject(place)
        else:
            self._gate.release(place)
            self._exhausted = False

    async def _admit(self) -> None:
        with self._changed:
            room = min(self._gate.capacity(), (self._max_concurrent - len(self._runner)) // self._n_samples)
        if room <= 0:
            return
        leases = await self._write(self._source.lease, room, self._n_samples)
        with self._changed:
            self._exhausted = len(leases) < room
            self._totals["leased"] += len(leases)
            self._totals["retries"] += sum(lease.attempts > 0 for _, lease in leases)
            for prompt, _ in leases:
                self._gate.admit(prompt.place)
        for prompt, lease in leases:
            self._runner.start(RunningGroup(prompt, lease, self._n_samples))

    async def _cancel_all(self) -> None:
        if self._scheduler is not None:
            self._scheduler.cancel()
            await asyncio.wait({self._scheduler}, timeout=CANCEL_GRACE)
        await self._runner.cancel_all()


def oldest(trajectories: list[Trajectory]) -> int | None:
    """Smallest version among the trained tokens of a group; None if none is trained."""
    versions = [version for trajectory in trajectories if (version := trajectory.oldest_version) is not None]
    return min(versions, default=None)
