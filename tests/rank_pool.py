"""Runs a function as the ranks of a gloo process group, in processes that cost milliseconds to start.

One template process imports torch, transformers and archon once per test session and never starts a thread; every run
forks its ranks from it. A rank therefore lives for one run: no group, seed or thread of one test reaches the next, nor
what torch caches by device mesh (to DTensor's sharding propagation, meshes of equal shape are one mesh, whatever their
process groups), and a rank that hangs or dies takes nothing along.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What is imported here is imported once and not once per rank. None of it starts a thread: a fork would lose it.
_PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "archon",
    "pytest",
)
_GRACE = 3.0  # seconds the other ranks have to answer after one has failed
_STACK_SECONDS = 2.0  # for a rank to write its stack; the signal handler needs no Python


class RankError(RuntimeError):
    """A run in which a rank raised, died or passed the deadline.

    Attributes:
        rank: the rank at fault: the first that failed on its own account, not because it lost a peer. Past the
            deadline: the lowest rank that had not returned.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RankPool:
    """Runs functions as ranks; ``size`` is the largest world. The template process starts with the first run (3 s)."""

    def __init__(self, size: int = 8) -> None:
        self.size = size

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, deadline: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """``function(*args, **kwargs)`` on ``world_size`` ranks, each in a default gloo group, one thread, seed 0.

        Args:
            function: from the top level of a module; asks torch.distributed for its rank. Ranks see the import path and
                working directory of now, but the environment variables of the first run. A script that runs ranks
                needs ``if __name__ == "__main__":``.
            deadline: seconds from the start of the ranks to the last result.

        Returns:
            What each rank returned, by rank. Tensors arrive on their device as copies; return DTensors as full or local
            tensors.

        Raises:
            RankError: a rank raised (with its traceback), died (with its exit code), or the deadline passed (with the
                stack of every rank that had not returned). All ranks are ended by then.
            TypeError: the function or an argument cannot be sent to another process.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size {world_size} is not in 1..{self.size}, the size of this pool")
        try:
            call = pickle.dumps(functools.partial(function, *args, **kwargs))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise TypeError(
                f"{error}: give a function from the top level of a module, and arguments as data"
            ) from error
        name = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
        context = _start_template()
        ranks: list[_Rank] = []
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            try:
                for number in range(world_size):
                    ranks.append(_Rank.start(context, number, world_size, call, deadline, Path(folder)))
                results = _collect(ranks, name, deadline)
                for rank in ranks:  # all answered: let them leave
                    rank.connection.close()
                for rank in ranks:
                    rank.process.join(_GRACE)
                return results
            finally:
                for rank in ranks:
                    rank.end()


def _start_template() -> multiprocessing.context.ForkServerContext:
    """The context to fork ranks from; starts its template process unless it runs. It ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


@dataclass(frozen=True)
class _Failure:
    """How a rank ended that returned nothing; ``when`` is in seconds of the clock all processes share."""

    rank: int
    reason: str  # one line
    details: str  # traceback, or nothing
    when: float
    lost_peer: bool  # gloo lost the connection to another rank: a consequence, never the cause

    @property
    def blame(self) -> tuple[bool, float]:
        """Sorts failures: those that began on their own before those that followed, then by time."""
        return self.lost_peer, self.when


@dataclass(frozen=True)
class _Rank:
    """One rank as the test process sees it."""

    rank: int
    process: multiprocessing.context.ForkServerProcess
    pid: int
    connection: Connection  # brings a pickled (succeeded, result or _Failure); closing it lets the rank leave
    stack_file: Path

    @classmethod
    def start(cls, context: Any, rank: int, world_size: int, call: bytes, deadline: float, folder: Path) -> _Rank:
        ours, theirs = context.Pipe()
        stack_file = folder / f"stack{rank}"
        process = context.Process(
            target=_rank_main, args=(theirs, rank, world_size, call, deadline, str(folder / "store"), str(stack_file))
        )
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            ours.close()
            raise RankError(
                rank, f"rank {rank} could not be forked: the template process failed, see stderr"
            ) from error
        finally:
            theirs.close()
        assert process.pid is not None
        return cls(rank, process, process.pid, ours, stack_file)

    def receive(self) -> tuple[bool, Any]:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            seen = time.monotonic()
            self.process.join(_GRACE)
            return False, _Failure(self.rank, f"died with {_exit_cause(self.process.exitcode)}", "", seen, False)

    def stack(self) -> str:
        """Python stacks of all its threads, taken without its cooperation."""
        try:
            os.kill(self.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "ended meanwhile\n"
        limit = time.monotonic() + _STACK_SECONDS
        written = ""
        while time.monotonic() < limit:
            before, written = written, self.stack_file.read_text() if self.stack_file.exists() else ""
            if written and written == before:
                return written
            time.sleep(0.05)
        return written or f"no stack within {_STACK_SECONDS:g} s\n"

    def end(self) -> None:
        """End the rank and whatever it started, if they still run."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left, or it has no group yet
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.process.close()


def _collect(ranks: Sequence[_Rank], name: str, deadline: float) -> list[Any]:
    """Wait for every rank's result; RankError as soon as it is certain who failed."""
    start = time.monotonic()
    limit = start + deadline
    pending = {rank.connection: rank for rank in ranks}
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    while pending and (left := limit - time.monotonic()) > 0:
        for connection in wait(list(pending), timeout=left):
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            succeeded, outcome = rank.receive()
            if succeeded:
                results[rank.rank] = outcome
            else:
                failures.append(outcome)
                limit = min(limit, time.monotonic() + _GRACE)
    if failures:
        failures.sort(key=lambda failure: failure.blame)
        raise RankError(failures[0].rank, _failure_report(failures, list(pending.values()), name, len(ranks)))
    if pending:
        late = [rank.rank for rank in pending.values()]
        stacks = "".join(f"\n--- rank {rank.rank} ---\n{rank.stack()}" for rank in pending.values())
        raise RankError(late[0], f"{_ranks(late)} of {len(ranks)} did not return from {name} in {deadline:g} s{stacks}")
    return [results[rank.rank] for rank in ranks]


def _failure_report(failures: Sequence[_Failure], ended: Sequence[_Rank], name: str, world_size: int) -> str:
    first, *others = failures
    lines = [f"rank {first.rank} of {world_size} {first.reason} in {name}"]
    lines += [f"rank {other.rank} {other.reason}" for other in others]
    if ended:
        lines.append(f"{_ranks([rank.rank for rank in ended])} ended: no answer {_GRACE:g} s after the first failure")
    return "\n".join(lines) + "".join(f"\n--- rank {f.rank} ---\n{f.details}" for f in failures if f.details)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _exit_cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"exit code {code} ({signal.Signals(-code).name})"
    return f"exit code {code}"


def _rank_main(
    connection: Connection, rank: int, world_size: int, call: bytes, deadline: float, store: str, stack_file: str
) -> None:
    """A rank's whole life: join the group, call, answer, and stay connected until every rank has answered."""
    os.setpgrp()  # so that whatever a test starts in a rank is ended with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            # Longer than the deadline: a stack says more than a timeout of gloo.
            timeout = timedelta(seconds=deadline + 60)
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout
            )
            # Plain pickle holds tensors by value; the connection's own would share them through file descriptors.
            answer = pickle.dumps((True, pickle.loads(call)()))
        except BaseException as error:  # pytest's own outcomes are no Exception
            summary = "".join(traceback.format_exception_only(error)).strip()
            reason = f"raised {summary.splitlines()[0]}"
            lost_peer = "gloo/transport" in summary
            failure = _Failure(rank, reason, traceback.format_exc(), time.monotonic(), lost_peer)
            connection.send_bytes(pickle.dumps((False, failure)))
            sys.exit(1)  # closes its connections, which wakes the ranks that wait for it
        sys.stdout.flush()
        connection.send_bytes(answer)
        # A rank that left now could cut off one that still reads what it sent.
        with contextlib.suppress(EOFError, ConnectionError):
            connection.recv_bytes()


def _end_with_parent() -> None:
    """Ranks must not outlive a test process that was killed, whatever they wait for."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(os.getpgrp(), signal.SIGKILL)
