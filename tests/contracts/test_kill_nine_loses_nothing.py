"""SIGKILL at random moments: every prompt ends once, no trajectory trains twice, replay reproduces every step."""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import random
import time
from pathlib import Path

from rollout_helpers import Serving, rollout, trajectory

from areal.rollout.episodes import EpisodeTask
from areal.rollout.journal import Journal
from areal.rollout.recovery import audit, recover
from areal.rollout.trajectory import Trajectory

PROMPTS, BATCH = 60, 4


async def sampled(task: EpisodeTask) -> Trajectory:
    """A function of (prompt, sample, version), as under deterministic sampling; one prompt in ten fails for good."""
    await asyncio.sleep(random.random() * 0.01)
    if task.prompt.place % 10 == 7:
        raise ValueError("unlucky prompt")
    return trajectory(reward=hash((task.order, Serving.version)) % 1000)


class Weights:
    """Training, as a digest of all that was trained so far, in order; checkpoints are atomic."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.step = folder, "start", 0

    def train(self, trajectories: list[Trajectory]) -> str:
        content = [(t.prompt_id, t.reward, t.versions.tolist()) for t in trajectories]
        self.state = hashlib.sha256(f"{self.state}{content}".encode()).hexdigest()
        self.step += 1
        time.sleep(0.03)
        return self.state

    def save(self) -> str:
        name = f"step_{self.step}.json"
        (self.folder / "partial").write_text(json.dumps([self.step, self.state]))
        os.rename(self.folder / "partial", self.folder / name)
        return name

    def load(self, name: str) -> None:
        self.step, self.state = json.loads((self.folder / name).read_text())


def life(folder: Path, eta: int) -> None:
    """One life of the run, from wherever it stands to the end."""
    weights = Weights(folder)
    journal = Journal.open(folder, "config")
    if checkpoint := journal.latest_checkpoint():
        weights.load(checkpoint.path)
    for batch in recover(journal, weights.step).batches:
        digest = weights.train(journal.trajectories(batch.trajectory_ids))
        journal.finish_batch(batch.step, digest)
    journal.close()
    with rollout(folder, sampled, count=PROMPTS, batch=BATCH, eta=eta, shuffle=True, version=weights.step) as (
        executor,
        journal,
    ):
        while (batch := executor.next_batch(weights.step)) is not None:
            assert all(batch.version - t.oldest_version <= eta for t in batch.trajectories)
            journal.record_batch(batch.version, batch.trajectory_ids, batch.seed)
            digest = weights.train(batch.trajectories)
            journal.finish_batch(batch.version, digest)
            Serving.version = weights.step
            executor.set_version(weights.step)
            if weights.step % 3 == 0:
                journal.record_checkpoint(weights.step, digest, weights.save())
                journal.prune(weights.step)
    (folder / "end").write_text(weights.state)


def run(folder: Path, eta: int, kills: int) -> str:
    folder.mkdir()
    context, rng, killed = multiprocessing.get_context("fork"), random.Random(eta), 0
    while not (folder / "end").exists():
        process = context.Process(target=life, args=(folder, eta))
        process.start()
        process.join(rng.uniform(0.02, 0.12) if killed < kills else 60)
        if process.is_alive():
            assert killed < kills, "the run hangs"
            process.kill()
            process.join()
            killed += 1
            journal = Journal.open(folder, "config")
            audit(journal)
            journal.close()
        else:
            assert process.exitcode == 0
    assert killed >= kills // 2, "the run was too short to be killed often"
    journal = Journal.open(folder, "config")
    audit(journal, finished=True)
    counts = journal.counts()
    assert counts["prompt/trained"] + counts["prompt/dropped"] == PROMPTS
    assert counts["prompt/dropped"] == counts["prompt/dropped/error:ValueError"] == PROMPTS // 10
    with journal.transaction() as db:
        recorded = [id_ for (ids,) in db.execute("SELECT trajectory_ids FROM batch") for id_ in json.loads(ids)]
    assert len(recorded) == len(set(recorded)) == counts["trajectory/trained"]
    journal.close()
    return (folder / "end").read_text()


def test_synchronous_run_ends_bit_equal_to_an_uninterrupted_one(tmp_path: Path) -> None:
    assert run(tmp_path / "killed", 0, 10) == run(tmp_path / "whole", 0, 0)


def test_asynchronous_run_replays_every_recorded_step(tmp_path: Path) -> None:
    run(tmp_path / "killed", 3, 10)
