"""SIGKILL while a checkpoint is saved, at any point and of any rank: the old one or the new one is there, whole."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_cases import PolicyLoss, make_batch, make_folder
from rank_pool import RankError, RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import archon
from archon import checkpoint
from archon.checkpoint import CheckpointError
from archon.weights import digest, read_folder

POOL = RankPool(2)
# Audit events before which a process is killed: the first wherever their path lies, for removing a tree names its files
# relative to an open folder, and looking up renameat2 names none.
ANYWHERE = ("os.remove", "os.rmdir", "ctypes.dlsym")
IN_THE_FOLDER = ("open", "os.rename", "os.mkdir", "os.chmod")


def tensors(version: int) -> dict[str, torch.Tensor]:
    """A sharded and a plain tensor that hold the version everywhere."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.full((40_000,), float(version)), mesh, [Shard(0)], src_data_rank=None)
    return {"weight": weight, "step": torch.tensor(float(version))}


def save(path: Path, version: int) -> None:
    checkpoint.save(path, tensors(version), {"version": version})


def loaded_version(path: Path) -> int:
    """Version of a checkpoint; an error unless every number in it is of that version."""
    found = {"weight": torch.zeros(40_000), "step": torch.tensor(0.0)}
    version: int = checkpoint.load(path, found, strict_names="")["version"]
    assert all((tensor == version).all() for tensor in found.values())
    return version


def watch(folder: Path, act: Callable[[], None]) -> None:
    """From now on, ``act`` before every step that changes what lies in ``folder`` or brings it to the disk."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ANYWHERE or (event in IN_THE_FOLDER and str(folder) in str(arguments)):
            act()

    def fsync(descriptor: Any) -> None:
        act()
        real_fsync(descriptor)

    real_fsync, os.fsync = os.fsync, fsync
    sys.addaudithook(audit)


def count_steps(path: Path) -> int:
    save(path, 1)
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    watch(path.parent, count)
    save(path, 2)
    return steps


def die_before_step(path: Path, step: int) -> None:
    save(path, 1)
    assert os.listdir(path.parent) == ["step"], "what the save before left is gone"

    def die() -> None:
        nonlocal step
        step -= 1
        if step < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(path.parent, die)
    save(path, 2)


def test_killed_at_any_step_of_replacing_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step"
    steps = POOL.run(count_steps, 1, path)[0]
    assert steps > 15
    versions = []
    for step in range(steps):
        with pytest.raises(RankError, match="SIGKILL"):
            POOL.run(die_before_step, 1, path, step)
        versions.append(loaded_version(path))
    assert versions == sorted(versions) and set(versions) == {1, 2}


def save_until_killed(path: Path, seconds: float) -> None:
    version: int = json.loads((path / "state.json").read_text())["version"]
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        version += 1
        save(path, version)
        with (path.parent / f"saved_by_{dist.get_rank()}").open("a") as proofs:
            proofs.write(f"{version}\n")


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_at_random_moments(tmp_path: Path, world_size: int) -> None:
    path = tmp_path / "step"
    POOL.run(save, world_size, path, 1)
    for _ in range(4):
        with pytest.raises(RankError, match="SIGKILL"):
            POOL.run(save_until_killed, world_size, path, random.uniform(0.02, 0.3))
        version = loaded_version(path)
        for proofs in tmp_path.glob("saved_by_*"):
            assert version >= max(int(proof) for proof in ["0", *proofs.read_text().split()])


def save_with_a_rank_that_dies(path: Path) -> None:
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    if rank == 1:
        watch(path.parent, lambda: os.kill(os.getpid(), signal.SIGKILL))
    saving = checkpoint.save(path, tensors(2), {"version": 2}, group=group, wait=False)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        saving.result(20)
    (path.parent / "said").write_text(f"{error.value} after {time.monotonic() - began:.0f} s")


def test_a_rank_that_dies_in_a_background_save_fails_it_on_the_others(tmp_path: Path) -> None:
    path = tmp_path / "step"
    POOL.run(save, 2, path, 1)
    with pytest.raises(RankError, match="rank 1"):
        POOL.run(save_with_a_rank_that_dies, 2, path)
    assert (tmp_path / "said").read_text().startswith(f"saving {path}: rank 0 lost the others")
    assert loaded_version(path) == 1
    assert sorted(os.listdir(tmp_path)) == ["said", "step"], "rank 0 removed what was half written"


def test_a_folder_without_its_last_file_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step"
    POOL.run(save, 1, path, 1)
    (path / "state.json").unlink()
    assert not checkpoint.is_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        checkpoint.load(path, {})


# ---- an engine on several ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("moe", tmp_path_factory.mktemp("model"))


def make_engine(folder: Path, layout: str) -> archon.Engine:
    optimizer = archon.OptimizerConfig(lr=1e-3)
    return archon.Engine.from_pretrained(folder, layout=layout, optimizer=optimizer, dtype="float32", device="cpu")


def train(engine: archon.Engine) -> str:
    engine.train_step(make_batch(engine.version, (5, 20)), PolicyLoss())
    return engine.digest()


def killed_in_the_background(folder: Path, path: Path, victims: tuple[int, ...], step: int) -> None:
    """Save version 1, train, and save version 2 while training goes on; ``victims`` die at a step of the writing."""
    engine = make_engine(folder, "d2e2")
    digests = [train(engine)]
    engine.save(path, "checkpoint")
    digests.append(train(engine))
    (folder.parent / "digests").write_text(json.dumps(digests))

    def die() -> None:
        nonlocal step
        step -= 1
        if step < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() in victims:
        watch(path.parent, die)
    engine.save(path, "checkpoint", wait=False)
    while True:  # into the kill: nothing tells a training rank that another one is about to die
        train(engine)


def resumed(folder: Path, layout: str, path: Path) -> tuple[int, str, list[str]]:
    engine = make_engine(folder, layout)
    engine.load(path)
    found = engine.version, engine.digest()
    train(engine)
    engine.save(path, "checkpoint")
    return *found, os.listdir(path.parent)


@pytest.mark.parametrize(
    ("victims", "step"), [((0,), 2), ((0,), 12), ((0,), 20), ((1,), 0), ((1,), 4), ((0, 1), 1), ((0, 1), 3)]
)
def test_killed_in_the_background_the_checkpoint_loads_in_another_layout(
    folder: Path, tmp_path: Path, victims: tuple[int, ...], step: int
) -> None:
    path = tmp_path / "steps" / "step"
    with pytest.raises(RankError, match="SIGKILL"):
        POOL.run(killed_in_the_background, 2, folder, path, victims, step)
    digests = json.loads((folder.parent / "digests").read_text())
    for version, weights, names in POOL.run(resumed, 2, folder, "(attn:t2|ffn:t2)", path):
        assert weights == digests[version - 1] and version == (2 if step == 20 else 1)
        assert names == ["step"], "what the dead left is gone"


def replaced(folder: Path, path: Path) -> list[str]:
    """Digests of ``path``, read before every step of replacing it, and those of what it held and came to hold."""
    engine, seen = make_engine(folder, "d2e2"), []
    weights = [train(engine)]
    engine.save(path)
    watching = dist.get_rank() == 0

    def look() -> None:
        nonlocal watching
        if watching:
            watching = False  # reading opens files too
            assert (path / "config.json").is_file()
            seen.append(digest(read_folder(path)))
            watching = True

    watch(path.parent, look)
    weights.append(train(engine))
    engine.save(path)
    watching = False
    return [*weights, *seen]


def test_a_saved_folder_is_replaced_in_one_step(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "folders" / "folder"
    (old, new, *seen), _ = POOL.run(replaced, 2, folder, path)
    assert len(seen) > 10 and seen == sorted(seen, key=[old, new].index), "never anything between the two"
    assert set(seen) == {old, new}
    assert os.listdir(path.parent) == ["folder"]
    assert digest(read_folder(path)) == new


def with_a_full_disk(folder: Path, path: Path) -> tuple[str, str]:
    engine = make_engine(folder, "d2e2")
    engine.save(path)
    before = engine.digest()
    train(engine)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with pytest.raises(Exception, match="File too large") as error:
        engine.save(path)
    train(engine)  # the ranks are still in step
    return str(error.value), before


def test_a_folder_that_rank_0_cannot_write_fails_on_every_rank(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "folders" / "folder"
    (_, before), (said, _) = POOL.run(with_a_full_disk, 2, folder, path)
    assert said.startswith(f"rank 0 could not write {path}: ")
    assert digest(read_folder(path)) == before and os.listdir(path.parent) == ["folder"]


def test_a_checkpoint_and_a_folder_replace_each_other(folder: Path, tmp_path: Path) -> None:
    path, engine = tmp_path / "saves" / "save", make_engine(folder, "d1")
    for kind in ("hf", "checkpoint", "hf"):
        expected = train(engine)
        engine.save(path, kind)
        train(engine)
        engine.load(path)
        assert engine.digest() == expected
        assert checkpoint.is_checkpoint(path) == (kind == "checkpoint") and os.listdir(path.parent) == ["save"]
