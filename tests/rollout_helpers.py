"""Small trajectories and runs for tests of the rollout package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal.rollout.episodes import Batch, EpisodeTask
from areal.rollout.executor import RolloutExecutor
from areal.rollout.journal import Journal
from areal.rollout.loop import LoopThread
from areal.rollout.prompts import PromptSource
from areal.rollout.recovery import recover
from areal.rollout.staleness import StalenessGate
from areal.rollout.trajectory import Trajectory


class Serving:
    """The version of the weights that the fake backend serves."""

    version = 0


def trajectory(
    version: int | None = None, *, tokens: int = 3, reward: float = 0.0, turn: int = 0, episode: str = ""
) -> Trajectory:
    """One prompt token and ``tokens`` sampled ones of one version, by default the one being served."""
    version = Serving.version if version is None else version
    return Trajectory(
        input_ids=list(range(tokens + 1)),
        loss_mask=[False] + [True] * tokens,
        logprobs=[0.0] + [-0.5] * tokens,
        versions=[-1] + [version] * tokens,
        reward=reward,
        finish_reason="stop",
        turn=turn,
        episode_id=episode,
    )


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q{index}", "question": index} for index in range(count)]


@contextmanager
def rollout(
    folder: Path, run_episode: Any, *, count: int = 8, batch: int = 2, eta: int = 1, **options: Any
) -> Iterator[tuple[RolloutExecutor, Journal]]:
    """A started executor on ``count`` prompts; always stopped, and its journal closed."""
    journal = Journal.open(folder, "config")
    gate = StalenessGate(
        batch, eta, total_steps=options.pop("total_steps", None), rejections_fill=options.pop("dynamic_bs", False)
    )
    source = PromptSource(
        options.pop("rows", None) or rows(count),
        journal,
        seed=1,
        shuffle=options.pop("shuffle", False),
        epochs=options.pop("epochs", 1),
    )
    loop = LoopThread("rollout")
    stop_reason = options.pop("stop_reason", "run_ended")
    Serving.version = version = options.pop("version", 0)
    defaults: dict[str, Any] = {"n_samples": 2, "max_concurrent": 64, "episode_timeout": 5.0, "stall_margin": 5.0}
    executor = RolloutExecutor(
        loop=loop, journal=journal, source=source, gate=gate, run_episode=run_episode, **(defaults | options)
    )
    try:
        if journal.resumed:
            recover(journal, version)
        executor.start(version)
        yield executor, journal
    finally:
        executor.stop(stop_reason)
        loop.stop(10)
        journal.close()


def train(executor: RolloutExecutor, journal: Journal, version: int = 0, steps: int | None = None) -> list[Batch]:
    """Take batches until none is left (or ``steps`` of them), recording each as a training loop does."""
    batches: list[Batch] = []
    while (steps is None or len(batches) < steps) and (batch := executor.next_batch(version)) is not None:
        journal.record_batch(version, batch.trajectory_ids, batch.seed)
        journal.finish_batch(version, f"weights after {version}")
        version += 1
        Serving.version = version
        executor.set_version(version)
        batches.append(batch)
    return batches


def places(batches: list[Batch]) -> list[int]:
    return [group.place for batch in batches for group in batch.groups]


async def episode(task: EpisodeTask) -> Trajectory:
    """The least workflow."""
    return trajectory()
