"""Training goes on while a checkpoint is written; an error of the writing comes out at the next save, or before."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layout_cases import PolicyLoss, make_batch, make_folder
from rank_pool import RankPool
from torch.distributed.checkpoint import FileSystemWriter

import archon
from archon import checkpoint
from archon.checkpoint import CheckpointError

LENGTHS = (37, 5, 20, 41)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("moe", tmp_path_factory.mktemp("model"))


def make_engine(folder: Path, layout: str) -> archon.Engine:
    optimizer = archon.OptimizerConfig(lr=1e-3)
    return archon.Engine.from_pretrained(
        folder, layout=layout, optimizer=optimizer, dtype="float32", device="cpu", max_tokens_per_mb=100
    )


def train(engine: archon.Engine, steps: int) -> None:
    for _ in range(steps):
        engine.train_step(make_batch(engine.version, LENGTHS), PolicyLoss())


def before_writing(act: Callable[[], None]) -> None:
    """From now on, ``act`` in the thread that writes, before this rank writes anything."""
    write = checkpoint._write

    def held_back(*arguments: Any) -> None:
        act()
        write(*arguments)

    checkpoint._write = held_back


def loaded(folder: Path, layout: str, paths: list[Path]) -> list[tuple[int, str]]:
    engine, found = make_engine(folder, layout), []
    for path in paths:
        engine.load(path)
        found.append((engine.version, engine.digest()))
    return found


def trained_meanwhile(folder: Path, layout: str, path: Path) -> tuple[int, str]:
    engine, may_write = make_engine(folder, layout), threading.Event()
    before_writing(lambda: may_write.wait(60))
    train(engine, 1)
    at_save = engine.version, engine.digest()
    engine.save(path, "checkpoint", wait=False)
    train(engine, 2)
    engine.forward(make_batch(9, LENGTHS))
    assert engine.version == 3 and engine.digest() != at_save[1]
    with pytest.raises(TimeoutError, match="has not ended"):
        engine.saved(0.01)
    assert not path.exists()
    may_write.set()
    engine.saved(60)
    assert checkpoint.is_checkpoint(path)
    engine.saved()  # nothing is left to wait for
    return at_save


@pytest.mark.parametrize("layout", ["d2e2", "p2"])
def test_steps_complete_while_a_slow_writer_has_not_begun(
    layout: str, folder: Path, tmp_path: Path, ranks: RankPool
) -> None:
    at_save, other = ranks.run(trained_meanwhile, 2, folder, layout, tmp_path / "step")
    assert other == at_save and at_save[0] == 1
    assert ranks.run(loaded, 1, folder, "d1", [tmp_path / "step"]) == [[at_save]]


def saved_twice(folder: Path, layout: str, first: Path, second: Path) -> list[tuple[int, str]]:
    engine, may_write = make_engine(folder, layout), threading.Event()
    before_writing(lambda: may_write.wait(60))
    train(engine, 1)
    found = [(engine.version, engine.digest())]
    engine.save(first, "checkpoint", wait=False)
    train(engine, 1)
    found.append((engine.version, engine.digest()))
    assert not first.exists()
    threading.Timer(0.2, may_write.set).start()
    engine.save(second, "checkpoint", wait=False)
    assert checkpoint.is_checkpoint(first), "it waited"
    train(engine, 1)
    engine.load(first)  # waits for the second
    assert checkpoint.is_checkpoint(second) and (engine.version, engine.digest()) == found[0]
    return found


def test_a_second_save_waits_for_the_first(folder: Path, tmp_path: Path, ranks: RankPool) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    found, other = ranks.run(saved_twice, 2, folder, "d2e2", *paths)
    assert found == other
    assert ranks.run(loaded, 2, folder, "(attn:t2|ffn:t2)", paths) == [found] * 2


def failed(folder: Path, layout: str, path: Path) -> list[str]:
    engine, said = make_engine(folder, layout), []
    write_data = FileSystemWriter.write_data

    def disk_full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if dist.get_rank() == 1:
        FileSystemWriter.write_data = disk_full
    for first_to_notice in (lambda: engine.saved(60), lambda: engine.save(path, "checkpoint", wait=False)):
        engine.save(path, "checkpoint", wait=False)
        train(engine, 1)
        with pytest.raises(CheckpointError) as error:
            first_to_notice()
        said.append(str(error.value))
        engine.saved()  # said once
    assert dist.get_rank() != 0 or os.listdir(path.parent) == [], "rank 0 removed what was half written"
    FileSystemWriter.write_data = write_data
    train(engine, 1)
    engine.save(path, "checkpoint", wait=False)
    engine.saved(60)
    return [*said, engine.digest()]


def test_an_error_of_the_writer_is_raised_on_every_rank(folder: Path, tmp_path: Path, ranks: RankPool) -> None:
    path = tmp_path / "steps" / "step"
    (said, again, weights), other = ranks.run(failed, 2, folder, "d2e2", path)
    assert other == [said, again, weights]
    assert said.startswith(f"saving {path}: rank 1: OSError: [Errno 28]") and again == said
    assert ranks.run(loaded, 1, folder, "d1", [path]) == [[(3, weights)]]


def test_only_checkpoints_are_saved_in_the_background(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder, "d1")
    with pytest.raises(ValueError, match="only a checkpoint is saved in the background"):
        engine.save(tmp_path / "folder", wait=False)
    assert os.listdir(tmp_path) == []


def test_one_process_saves_in_the_background_too(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder, "d1")
    train(engine, 1)
    expected = engine.digest()
    engine.save(tmp_path / "step", "checkpoint", wait=False)
    train(engine, 1)
    engine.load(tmp_path / "step")
    assert (engine.version, engine.digest()) == (1, expected)
