"""What passes through the executor: the task of an episode, its group, and the batch that a training step takes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from areal.rollout.errors import InvalidTrajectory
from areal.rollout.journal import Lease
from areal.rollout.prompts import Prompt
from areal.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class EpisodeTask:
    """One episode to run: sample ``sample`` of the group ``group_id`` on ``prompt``.

    ``order`` (place, sample) is the same for the same sample in every repetition of a run; ids are not, as each lease
    of a prompt makes a new group.
    """

    prompt: Prompt
    sample: int
    attempt: int
    group_id: str
    episode_id: str
    order: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Group:
    """A complete group: the trajectories of all its episodes, in sample order."""

    place: int
    group_id: str
    trajectories: list[Trajectory]
    completed: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class Batch:
    """What the step that starts at ``version`` trains: whole groups in prompt order.

    Attributes:
        rejected: places filled by rejections (``dynamic_bs``).
        seed: of this step, a function of the run's seed and ``version``.
        waited: seconds that the trainer waited for it.
    """

    version: int
    groups: list[Group]
    rejected: int
    seed: int
    waited: float

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def trajectory_ids(self) -> list[str]:
        return [trajectory.id for trajectory in self.trajectories]


@dataclass(eq=False)
class RunningGroup:
    """A leased prompt and its episodes."""

    prompt: Prompt
    lease: Lease
    size: int
    admitted: float = field(default_factory=time.monotonic)
    ended: int = 0
    results: dict[int, list[Trajectory]] = field(default_factory=dict)
    failure: str | None = None
    """Reason of the first failure; the other episodes are cancelled."""
    hopeless: bool = False
    """No retry can help."""

    @property
    def sampled(self) -> list[Trajectory]:
        """Trajectories of the episodes that succeeded, in sample order."""
        return [trajectory for sample in sorted(self.results) for trajectory in self.results[sample]]


@dataclass(eq=False)
class RunningEpisode:
    """An episode in flight."""

    group: RunningGroup
    task: EpisodeTask
    future: asyncio.Task[list[Trajectory]]
    deadline: asyncio.TimerHandle | None = None
    started: float = field(default_factory=time.monotonic)
    cut: str | None = None
    """Why it was cancelled: ``timeout``, or ``cancelled`` because its group failed."""
    closed: bool = False


Outcome = list[Trajectory] | BaseException
"""What an episode gave: its trajectories, none if the workflow rejected the prompt, or what it raised."""


def step_seed(seed: int, version: int) -> int:
    """31-bit seed of one training step."""
    digest = hashlib.sha256(f"step {version} of run {seed}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def claim(result: object, task: EpisodeTask, lineage: int) -> list[Trajectory]:
    """What a workflow returned, checked and stamped with its owner; an empty list is a rejection by the workflow.

    Raises:
        InvalidTrajectory: not a trajectory, two of the same turn, or a log-prob or reward under the mask that is not
            finite.
    """
    if result is None:
        return []
    trajectories = [result] if isinstance(result, Trajectory) else result
    if not isinstance(trajectories, Sequence):
        raise InvalidTrajectory(f"a workflow returns Trajectory, a list of them or None, not {type(result).__name__}")
    for trajectory in trajectories:
        if not isinstance(trajectory, Trajectory):
            raise InvalidTrajectory(f"a workflow returned a list holding {type(trajectory).__name__}, not Trajectory")
        trajectory.validate()
        for name in ("logprobs", "token_rewards"):
            if not torch.isfinite(getattr(trajectory, name)[trajectory.loss_mask]).all():
                raise InvalidTrajectory(f"{name} of a trained token is not finite in turn {trajectory.turn}")
        trajectory.prompt_id = task.prompt.id
        trajectory.group_id = task.group_id
        trajectory.episode_id = task.episode_id
        trajectory.lineage = lineage
    if len({trajectory.turn for trajectory in trajectories}) != len(trajectories):
        raise InvalidTrajectory(f"two trajectories of one episode share a turn: {[t.turn for t in trajectories]}")
    return list(trajectories)
