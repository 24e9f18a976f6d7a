"""Runs a module once in every rank of a job on this machine, in fresh processes: one call goes in, reports come out.

A call is one line of JSON on a rank's standard input, a report a JSON file. A rank that dies or is stuck has a report
too, made from how it ended and from the phase it was in.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from archon import phase

Report = dict[str, Any]
"""What a rank says. A failed one says ``failure``, which follows the words "rank 3", and ``time`` of the monotonic
clock, and ``consequence``: whether another rank's failure may have been the cause."""

_TICK_SECONDS = 0.05
_SETTLE_SECONDS = 1.0
"""After one rank failed: how long the others have to fail too, so that the cause is told and not a consequence."""
_LOST_PEER = ("gloo", "NCCL", "HCCL", "Connection reset", "Connection closed")
"""What messages of collectives hold that failed because another process was gone."""


def run_ranks(module: str, call: Mapping[str, Any], world: int, deadline: float) -> list[Report]:
    """Run ``python -m module``, whose ``main`` calls ``serve``, in ``world`` processes. All have ended on return.

    Args:
        call: plain data for every rank.
        deadline: seconds from the start to the last report.

    Raises:
        TimeoutError: the deadline passed; the message says what each rank was doing.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as name:
        ranks: list[_Rank] = []
        try:
            for rank in range(world):
                ranks.append(_Rank.start(module, json.dumps({**call, "folder": name}), rank, world, Path(name)))
            in_time = _wait(ranks, deadline)
            reports = [rank.report() for rank in ranks]
        finally:
            for started in ranks:
                started.end()
    if not in_time:
        late = [f"rank {rank} {report['failure']}" for rank, report in enumerate(reports) if "failure" in report]
        raise TimeoutError(f"not done in {deadline:g} s: {'; '.join(late)}")
    return reports


def first_failure(reports: Sequence[Report]) -> str | None:
    """The failure that came first and was no consequence of another; None if there is none."""
    failed = [(rank, report) for rank, report in enumerate(reports) if "failure" in report]
    if not failed:
        return None
    rank, first = min(failed, key=lambda pair: (pair[1]["consequence"], pair[1]["time"]))
    return f"rank {rank} {first['failure']}"


def failure_of(error: Exception) -> Report:
    """The report of a rank that raised."""
    message = str(error).strip()
    out_of_memory = isinstance(error, MemoryError) or "out of memory" in message or "allocate memory" in message
    what = "ran out of memory" if out_of_memory else f"raised {type(error).__name__}"
    lost_peer = any(mark in message for mark in _LOST_PEER)
    return _failed(f"{what} in phase {phase.now()}: {message}", time.monotonic(), lost_peer)


def serve(work: Callable[[dict[str, Any], dist.Store, int, int], Report]) -> None:
    """One rank's side of ``run_ranks``: make the call that arrives, write the report, exit with 1 if it failed.

    Args:
        work: takes the call, a store that all ranks share, this rank, and their number.
    """
    call = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(call.pop("folder"))
    report = work(call, dist.FileStore(str(folder / "store"), world), rank, world)
    (folder / f"report{rank}").write_text(json.dumps(report))
    sys.exit("failure" in report)


def _end_with_parent() -> None:
    """End this process, even in the middle of a collective, when the one that started it is gone."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _failed(failure: str, when: float, consequence: bool) -> Report:
    return {"failure": failure, "time": when, "consequence": consequence}


@dataclass(eq=False)
class _Rank:
    """A process, the leader of a process group of its own."""

    rank: int
    process: subprocess.Popen[str]
    folder: Path
    ended: float = 0.0
    """``time.monotonic()`` when its end was noticed."""

    @classmethod
    def start(cls, module: str, call: str, rank: int, world: int, folder: Path) -> _Rank:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment = {
            "OMP_NUM_THREADS": str(max(1, cores // world)),
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "PYTHONPATH": os.pathsep.join(sys.path),  # the module may lie where only this process looks
            phase.ENVIRONMENT_VARIABLE: str(folder / f"phase{rank}"),
        }
        with (folder / f"log{rank}").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,  # ended with what it started; an interrupt at the terminal is the parent's to handle
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; waiting for it finds out
            process.stdin.write(call + "\n")
            process.stdin.flush()
        return cls(rank, process, folder)

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        code = self.process.poll()
        if code is not None:
            self.ended = self.ended or time.monotonic()
        return code

    def report(self) -> Report:
        """What it wrote, or else how it ended."""
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            written: Report = json.loads((self.folder / f"report{self.rank}").read_text())
            return written
        code, now = self.poll(), phase.read(self.folder / f"phase{self.rank}") or "start"
        if code is None:
            return _failed(f"was in phase {now}", time.monotonic(), True)
        if code < 0:
            cause = f"{signal.Signals(-code).name} in phase {now}"
            if -code == signal.SIGKILL:
                cause += ", as the system does when memory runs out"
            return _failed(f"died of {cause}", self.ended, -code == signal.SIGABRT)  # gloo aborts over lost peers
        lines = (self.folder / f"log{self.rank}").read_text(errors="replace").strip().splitlines() or ["no output"]
        return _failed(f"ended with exit code {code} in phase {now}: {lines[-1]}", self.ended, False)

    def end(self) -> None:
        """End it and what it started, if they still run."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def _wait(ranks: Sequence[_Rank], deadline: float) -> bool:
    """Wait until all have ended, or a little longer than the first that failed; False if the deadline passed."""
    limit, failed = time.monotonic() + deadline, False
    while time.monotonic() < limit:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes):
            return True
        if not failed and any(codes):
            failed, limit = True, min(limit, time.monotonic() + _SETTLE_SECONDS)
        time.sleep(_TICK_SECONDS)
    return failed
