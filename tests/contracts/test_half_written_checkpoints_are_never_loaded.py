"""SIGKILL while a checkpoint is saved, at any point and of any rank: the old one or the new one is there, whole."""

from __future__ import annotations

import json
import os
import random
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
from rank_pool import RankError, RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from archon import checkpoint
from archon.checkpoint import CheckpointError

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
    version: int = checkpoint.load(path, found, strict_names=True)["version"]
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
