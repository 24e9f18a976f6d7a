"""Training state on disk: every rank writes what it holds, any layout reads it back, bit-exact.

A checkpoint is a folder of torch.distributed.checkpoint with a flat list of named tensors, and ``state.json`` beside
them. It is complete under its name or absent: all ranks fill a hidden folder, which takes the name at the end.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from archon.blocks import Block, BlockLoadPlanner, BlockSavePlanner, local_blocks
from archon.folders import fsync, make_work_folder, replace_folder

T = TypeVar("T")

_STATE = "state.json"

# One process needs no collectives; torch warns of that at every save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; every rank raises it, with what failed on which rank."""


@dataclass(frozen=True)
class Saving:
    """A checkpoint on its way to the disk.

    The caller keeps it, and calls ``result`` before the next ``save``: two at a time would mix up their collectives.
    """

    path: Path
    _future: Future[None]
    _began: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint stands under its name on every rank.

        Without ``timeout`` (seconds) the waits for other ranks end with the timeout of their group.

        Raises:
            CheckpointError: it was not written; an older checkpoint of that name still stands.
            TimeoutError: it has not ended yet.
        """
        try:
            self._future.result(timeout)
        except TimeoutError as error:
            age = time.monotonic() - self._began
            raise TimeoutError(f"saving {self.path} has not ended after {age:.0f} s; waited {timeout} s") from error


def save(
    path: Path,
    tensors: Mapping[str, Tensor],
    state: dict[str, Any],
    *,
    group: ProcessGroup | None = None,
    wait: bool = True,
) -> Saving:
    """Write tensors and state to ``path``, a folder that all ranks see; every rank of the group calls it.

    A kill at any moment, of any rank, leaves the old checkpoint of that name or the new one. If any rank fails, all
    raise, the old one stands, and nothing of the new one is left.

    Args:
        path: the checkpoint; an existing one is replaced.
        tensors: what this rank holds, of any shape, dtype and device. A DTensor, on any mesh, is this rank's part of
            the whole; replicas are written once. A plain tensor is the whole: ranks that give one of the same name
            hold equal copies. Ranks may give different names, as pipeline stages do.
        state: JSON values; rank 0's are written.
        group: the ranks that hold the tensors; None takes the default group, if there is one.
        wait: False copies the tensors to host memory, returns, and writes in a thread. The originals may then change.
            The thread's collectives run on ``group``, a gloo group that nothing else uses meanwhile.

    Raises:
        ValueError: several ranks would write in the background and ``group`` is None.
        CheckpointError: a rank failed, before or (``wait``) during the writing.
    """
    ranks = _several_ranks(group)
    if not wait and group is None and ranks is not None:
        raise ValueError(
            f"saving {path} in the background would mix its collectives with those of {ranks.size()} training ranks: "
            'pass group=dist.new_group(backend="gloo"), made once and used for nothing else'
        )
    text, blocks = _together(f"saving {path}", ranks, lambda: (json.dumps(state), local_blocks(tensors, copy=not wait)))
    if wait:
        _write(path, blocks, text, ranks)
        written: Future[None] = Future()
        written.set_result(None)
        return Saving(path, written)
    writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    saving = Saving(path, writer.submit(_write, path, blocks, text, ranks))
    writer.shutdown(wait=False)  # the thread ends with its one task; the interpreter waits for it before it exits
    return saving


def load(
    path: Path, tensors: Mapping[str, Tensor], *, group: ProcessGroup | None = None, strict_names: str | None = None
) -> dict[str, Any]:
    """Fill the tensors in place with what ``save`` wrote, in whatever layout that was, and return its state.

    Every rank of the group calls it with the names it needs. After an error the content of the tensors is undefined.

    Args:
        path: the checkpoint.
        tensors: plain tensors, filled whole, or DTensors on any mesh; shapes and dtypes as they were saved.
        group: the ranks that load; None takes the default group, if there is one.
        strict_names: a name in the checkpoint that begins so, and that no rank asks for, is an error ("": any name).

    Raises:
        FileNotFoundError: ``path`` holds no complete checkpoint.
        CheckpointError: on some rank a name is missing, a shape or a dtype differs, or a file cannot be read.
    """
    ranks = _several_ranks(group)
    blind = [rank for rank, seen in enumerate(_gather(ranks, is_checkpoint(path))) if not seen]
    if blind:
        where = f" on ranks {blind}" if ranks is not None else ""
        raise FileNotFoundError(f"{path} holds no complete checkpoint{where} ({_STATE} is missing)")
    blocks = _together(f"loading {path}", ranks, lambda: local_blocks(tensors))
    planner, reader = BlockLoadPlanner(strict_names), dcp.FileSystemReader(path)
    _together(
        f"loading {path}",
        ranks,
        lambda: dcp.load(
            dict(blocks), storage_reader=reader, planner=planner, process_group=ranks, no_dist=ranks is None
        ),
    )
    return json.loads((path / _STATE).read_text())


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` holds a checkpoint; where it does, it is complete."""
    return (path / _STATE).is_file()


def _write(path: Path, blocks: dict[str, Block], state: str, ranks: ProcessGroup | None) -> None:
    first, doing = ranks is None or ranks.rank() == 0, f"saving {path}"
    work = _gather(ranks, _together(doing, ranks, lambda: make_work_folder(path) if first else path))[0]

    def find() -> None:
        if not work.is_dir():
            raise FileNotFoundError(f"rank 0 made {work}, not seen here: all ranks must share the folder's filesystem")

    def fill() -> None:
        # Nothing is copied ahead: the tensors are in host memory, or else the copies are far faster than the disk. And
        # copying ahead would use the accelerator from the writing thread, which knows only the first one.
        writer = dcp.FileSystemWriter(work, sync_files=True, per_thread_copy_ahead=0)
        dcp.save(
            dict(blocks), storage_writer=writer, planner=BlockSavePlanner(), process_group=ranks, no_dist=ranks is None
        )
        if first:
            (work / _STATE).write_text(state)
            fsync(work / _STATE)
        fsync(work)

    try:
        _together(doing, ranks, find)
        _together(doing, ranks, fill)
        _together(doing, ranks, lambda: replace_folder(work, path) if first else None)
    finally:
        if first:
            shutil.rmtree(work, ignore_errors=True)


# ---- ranks together


def _several_ranks(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group whose ranks act together, or None if this process is the only one."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    return group if group is not None and group.size() > 1 else None


def _gather(ranks: ProcessGroup | None, value: T) -> list[T]:
    """The small ``value`` of every rank, by rank."""
    if ranks is None:
        return [value]
    values: list[Any] = [None] * ranks.size()
    dist.all_gather_object(values, value, group=ranks)
    return values


def _together(doing: str, ranks: ProcessGroup | None, step: Callable[[], T]) -> T:
    """Do a step on every rank and return this rank's result once all are through.

    Raises:
        CheckpointError: the step failed on some rank; all ranks raise it, with the same message.
    """
    rank = 0 if ranks is None else ranks.rank()
    cause: BaseException | None = None
    failures: dict[int, str] = {}
    try:
        result = step()
    except CheckpointException as error:  # what torch raises on every rank when one fails
        cause, failures = error, {place: _said(failure) for place, (failure, _) in error.failures.items()}
    except Exception as error:
        cause, failures = error, {rank: _said(error)}
    try:
        everywhere = _gather(ranks, failures)
    except RuntimeError as error:
        raise CheckpointError(f"{doing}: rank {rank} lost the others ({_said(error)})") from (cause or error)
    failed = {place: said for failures in everywhere for place, said in failures.items()}
    if failed:
        said = "; ".join(f"rank {place}: {failed[place]}" for place in sorted(failed))
        raise CheckpointError(f"{doing}: {said}") from cause
    return result


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
