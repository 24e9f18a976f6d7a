"""The parent's end of one reward worker: what it was sent, what it does, and since when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from areal.rewards import worker

STALL_SECONDS = 0.05
"""A call that runs longer gives those queued behind it back to the other workers."""

BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from areal.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
"""A worker never imports the parent's main script: scripts need no main guard, and notebooks work."""

Phase = Literal["start", "idle", "load", "run", "drop"]
"""What a worker does: starting, nothing, importing a function, running one, or (having been told to give back the calls
it has not begun) confirming that it did."""


@dataclass(eq=False)
class Function:
    """A reward function as it travels, and how long a call of it takes (moving average, seconds; None before one)."""

    name: str
    blob: bytes
    seconds: float | None = None


@dataclass(eq=False)
class Call:
    id: int
    function: Function
    arguments: bytes
    result: asyncio.Future[float]


class Owner(Protocol):
    """What a handle tells the pool."""

    timeout: float
    start_timeout: float

    def answered(self, call: Call, kind: int, value: Any, seconds: float) -> None: ...
    def returned(self, calls: list[Call]) -> None: ...
    def available(self) -> None: ...
    def expired(self, handle: Handle, seconds: float) -> None: ...
    def lost(self, handle: Handle) -> None: ...


class Handle(asyncio.Protocol):
    """Starts one worker process and speaks with it. ``calls`` are sent and unanswered, in order; the first one runs.

    The deadline of a call counts from when the worker begins it, so waiting behind others never expires a call.
    """

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.calls: deque[Call] = deque()
        self.phase: Phase = "start"
        self.since = loop.time()
        self._owner = owner
        self._loop = loop
        self._giving_back = False
        self._frames = worker.Frames()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints belongs to the log
                process_group=0,  # killed with what it started; an interrupt at the terminal is ours to handle
            )
        self._socket = ours
        self._connecting = loop.create_task(self._connect())
        self._watch()

    async def _connect(self) -> None:
        await self._loop.create_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.lost(self)

    @property
    def accepts(self) -> bool:
        return self.phase in ("idle", "load", "run") and not self._giving_back

    def send(self, calls: list[Call]) -> None:
        assert self._transport is not None
        busy = bool(self.calls)
        self.calls.extend(calls)
        batch = [(call.id, call.function.name, call.function.blob, call.arguments) for call in calls]
        self._transport.write(worker.encode((worker.RUN, batch)))
        if busy:
            self._watch()
        else:
            self._enter("run")

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._receive(*message)
        self._owner.available()

    def _receive(self, kind: int, call_id: int, value: Any, seconds: float) -> None:
        if kind in (worker.READY, worker.DROPPED):
            self._giving_back = False
            self._enter("run" if self.calls else "idle")
        elif not self.calls or self.calls[0].id != call_id:
            return  # begun just before it was told to give it back: another worker answers that call
        elif kind == worker.LOADING:
            self._enter("load")
        elif kind == worker.LOADED:
            self._enter("run")
        else:
            self._owner.answered(self.calls.popleft(), kind, value, seconds)
            self._enter("run" if self.calls else "drop" if self._giving_back else "idle")

    def _enter(self, phase: Phase) -> None:
        self.phase, self.since = phase, self._loop.time()
        self._watch()

    def _due(self) -> float:
        if self.phase in ("start", "load"):
            return self.since + self._owner.start_timeout
        waiting = len(self.calls) > 1
        return self.since + (min(STALL_SECONDS, self._owner.timeout) if waiting else self._owner.timeout)

    def _watch(self) -> None:
        """Keep one timer armed while the worker owes an answer; it re-arms itself, so a call costs no timer."""
        if self.phase == "idle" or (self._timer is not None and self._timer.when() <= self._due()):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due(), self._check)

    def _check(self) -> None:
        self._timer = None
        if self.phase != "idle" and self._due() <= self._loop.time():
            if self.phase != "run" or len(self.calls) == 1:
                return self._owner.expired(self, self._loop.time() - self.since)
            self._give_back()
        self._watch()

    def _give_back(self) -> None:
        assert self._transport is not None
        self._giving_back = True
        first, *waiting = self.calls
        self._transport.write(worker.encode((worker.DROP, first.id)))
        self.calls = deque([first])
        self._owner.returned(waiting)

    def kill(self) -> None:
        """End the process and all it started, at once. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()
        else:
            self._connecting.cancel()
            self._socket.close()

    def exit_reason(self) -> str:
        """How a process that closed its socket ended, such as ``signal SIGKILL`` or ``exit code 3``."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "a closed connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
