"""A rank that dies or raises ends the job at once; the error names it, and says what every other rank was doing."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from training_stand_in import ENGINE, MODEL

from archon import LossSpec, OptimizerConfig, PackedBatch
from areal.launch.local import LocalTrainer
from areal.launch.supervise import TrainingFailed

BATCH = PackedBatch.from_sequences([{"input_ids": torch.arange(5)}])
SECONDS = 30.0
"""60 are promised."""


def start(folder: Path) -> LocalTrainer:
    trainer = LocalTrainer(MODEL, layout="d3", logs=folder, device="cpu", engine=ENGINE, deadline=120)
    assert trainer.train_step(BATCH, LossSpec("none")) == {"loss": 30.0}
    return trainer


def fail(trainer: LocalTrainer, rank: int, what: str) -> TrainingFailed:
    """What the step says in which ``rank`` misbehaves."""
    pids, began = trainer.health()["processes"], time.monotonic()
    with pytest.raises(TrainingFailed) as caught:
        trainer.train_step(BATCH, LossSpec("none", {"rank": rank, "what": what}))
    assert time.monotonic() - began < SECONDS
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert caught.value.rank == rank
    message = str(caught.value)
    for survivor in {0, 1, 2} - {rank}:
        section = next(part for part in message.split("\n\n") if part.startswith(f"rank {survivor} "))
        assert "in phase reduce" in section
        assert "training_stand_in.py" in section and "in train_step" in section  # the stack of the waiting rank
    with pytest.raises(TrainingFailed, match="training has ended before"):
        trainer.digest()
    trainer.close()
    return caught.value


def test_a_killed_rank(tmp_path: Path) -> None:
    trainer = start(tmp_path)
    victim = trainer.health()["processes"][1]
    killer = threading.Timer(1.0, os.kill, (victim, signal.SIGKILL))
    killer.start()
    message = str(fail(trainer, 1, "sleep"))
    assert message.startswith(
        f"train_step at version 1 failed: rank 1 (pid {victim}), in phase forward/backward of micro-b"
    )
    assert "was killed by SIGKILL" in message.splitlines()[0]


@pytest.mark.parametrize(
    ("what", "event"),
    [("exit", "exited with code 3"), ("crash", "died of SIGSEGV"), ("raise", "raised ValueError: token 7 is not in")],
)
def test_a_rank_that_ends_by_itself(tmp_path: Path, what: str, event: str) -> None:
    error = fail(start(tmp_path), 2, what)
    first, *evidence = str(error).split("\n\n")[0].splitlines()
    assert event in first and "in phase forward/backward of micro-batch 3" in first
    if what == "raise":
        assert error.types[0] == "ValueError"
    if what != "exit":
        assert any("in misbehave" in line for line in evidence)  # the traceback, or what the crash left in the log


@pytest.mark.parametrize("layout", ["d2e2", "p2"])
def test_a_rank_killed_in_a_step_of_the_real_engine(layout: str, tmp_path: Path) -> None:
    """The survivor waits for it inside a collective; its micro-batch is told all the same."""
    trainer = LocalTrainer(
        MODEL,
        layout=layout,
        logs=tmp_path,
        device="cpu",
        dtype="float32",
        init_from_scratch=True,
        max_tokens_per_mb=64,
        optimizer=OptimizerConfig(),
        deadline=120,
    )
    batch = PackedBatch.from_sequences([{"input_ids": torch.arange(60)}] * 400)
    victim = trainer.health()["processes"][1]
    killer = threading.Timer(1.5, os.kill, (victim, signal.SIGKILL))
    killer.start()
    with pytest.raises(TrainingFailed) as caught:
        while True:
            trainer.train_step(batch, LossSpec("archon.losses.SupervisedLoss"))
    trainer.close()
    message = str(caught.value)
    assert caught.value.rank == 1 and "was killed by SIGKILL" in message.splitlines()[0]
    survivor = message[message.index("\n\nrank 0 ") :]
    assert re.search(r"in phase .*(forward|backward).* of micro-batch \d+", survivor), survivor
    assert "in train_step" in survivor and "pipeline.py" in survivor, survivor
