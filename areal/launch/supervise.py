"""Watches the processes of one SPMD job: the first failure ends them all and is told with what every rank was doing."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archon import phase
from areal.launch.wire import Channel, Message

TICK_SECONDS = 0.2
SETTLE_SECONDS = 1.0
"""After a rank reported an exception: how long to look for a dead one, whose peers see a broken connection first."""
EXIT_SECONDS = 5.0
STACK_SECONDS = 2.0
CLOSE_SECONDS = 10.0
SHOWN_LINES = 60
"""Lines of one stack, and a third as many of a log, that a message holds."""
SHOWN_CHARACTERS = 200


class TrainingFailed(RuntimeError):
    """A training process died or raised, and all of them were ended. The message says which, and what each was doing.

    Attributes:
        rank: the one that failed first, or None.
        types: names of the classes of the exception that it raised, most derived first; empty if it died.
        reason: message of that exception.
    """

    def __init__(self, message: str, rank: int | None = None, types: Sequence[str] = (), reason: str = "") -> None:
        super().__init__(message)
        self.rank, self.types, self.reason = rank, tuple(types), reason


class TrainingTimeout(TrainingFailed, TimeoutError):
    """The training processes did not answer within the deadline of a call, and all of them were ended."""


@dataclass(eq=False)
class Member:
    """One process of the job, started as the leader of a process group of its own."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    phase_file: Path
    stack_file: Path
    log: Path
    log_start: int
    """Bytes of the log that earlier processes wrote."""
    inbox: deque[Message] = field(default_factory=deque)
    failure: dict[str, Any] | None = None
    """The exception that the process reported: ``types, message, traceback, time``."""
    ended: float | None = None
    """``time.monotonic()`` when its end was noticed."""

    def read(self) -> None:
        """Take what arrived."""
        try:
            while (message := self.channel.arrived()) is not None:
                if "failure" in message.header:
                    self.failure = message.header["failure"]
                else:
                    self.inbox.append(message)
        except EOFError:
            self.ended = self.ended or time.monotonic()

    @property
    def aborted(self) -> bool:
        """Collectives abort their process over what another one did."""
        return self.ended is not None and self.exit_reason().endswith("SIGABRT")

    @property
    def failed_first(self) -> tuple[bool, bool, float]:
        """Sorts the failure that caused others before those.

        A process that raised stays, so it breaks no connection: a death is never a consequence of a report, but a
        report next to a death may be one.
        """
        return self.ended is None, self.aborted, self.ended or (self.failure or {}).get("time", float("inf"))

    def exit_reason(self) -> str:
        try:
            code = self.process.wait(timeout=EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection and did not exit"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (by hand, or for want of memory)"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def what_happened(self) -> str:
        """One line: rank, phase, and its end, its exception or neither."""
        if self.ended is not None:
            event = self.exit_reason()
        elif self.failure is not None:
            reason = self.failure["message"].partition("\n")[0]
            event = f"raised {self.failure['types'][0]}: {reason[:SHOWN_CHARACTERS]}"
        else:
            event = "was running"
        until = self.ended or (self.failure or {}).get("time") or time.monotonic()
        now = phase.read(self.phase_file)
        doing = f"in phase {now} for {until - now.since:.1f} s" if now else "before its first phase"
        return f"rank {self.rank} (pid {self.process.pid}), {doing}, {event}"

    def evidence(self) -> str:
        """Traceback, or stack, or end of the log, indented."""
        if self.failure is not None:
            text, limit = self.failure["traceback"], SHOWN_LINES
        elif self.ended is None:
            text, limit = self.stack() or f"(no stack within {STACK_SECONDS:.0f} s)", SHOWN_LINES
        else:
            text, limit = f"end of {self.log}:\n{self._log_tail()}", SHOWN_LINES // 3
        lines = [line for line in text.splitlines() if line.strip(" ^~")]  # without the marks below expressions
        if len(lines) > limit and self.ended is None:  # where it came from, and where it is
            lines = [*lines[: limit // 2], "  ...", *lines[-limit // 2 :]]
        else:
            lines = lines[-limit:]
        return "\n".join(f"    {line}" for line in lines)

    def stack(self) -> str:
        """The last dump of its Python stacks, without the thread that only waits for the controller's end."""
        dump = self.stack_file.read_text(errors="replace") if self.stack_file.exists() else ""
        threads = [thread for thread in dump.split("\n\n") if "_end_with_controller" not in thread]
        return "\n".join(threads).strip()

    def _log_tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, file.seek(0, os.SEEK_END) - (1 << 16)))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-SHOWN_LINES // 3 + 1 :]) or "(empty)"

    def kill(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Team:
    """The processes of one job. After the first failure none of them runs any more.

    Attributes:
        failure: what ended the job, or None.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self.failure: TrainingFailed | None = None
        self._ended = False
        self._selector = selectors.DefaultSelector()
        for member in self.members:
            self._selector.register(member.channel.connection, selectors.EVENT_READ, member)

    def tell(self, rank: int, header: dict[str, Any], payload: bytes = b"", *, what: str, seconds: float) -> None:
        """Send a message to one rank. Raises as ``hear``."""
        try:
            self.members[rank].channel.send(header, payload, seconds=seconds)
        except TimeoutError:
            raise self._late(what, seconds) from None
        except OSError:
            raise self._failed(what) from None

    def hear(self, ranks: Sequence[int], *, what: str, seconds: float) -> list[Message]:
        """The next message of each of the given ranks, while all are watched.

        Args:
            what: the call that is waited for, for messages.

        Raises:
            TrainingFailed: a rank died or raised, one of the others included.
            TrainingTimeout: ``seconds`` passed.
        """
        end = time.monotonic() + seconds
        while True:
            self._pump(0.0)
            if any(member.ended or member.failure for member in self.members):
                raise self._failed(what)
            if all(self.members[rank].inbox for rank in ranks):
                return [self.members[rank].inbox.popleft() for rank in ranks]
            if (left := end - time.monotonic()) <= 0:
                raise self._late(what, seconds)
            self._selector.select(min(left, TICK_SECONDS))

    def _pump(self, seconds: float) -> None:
        """Read what has arrived or arrives within ``seconds``, and notice who has ended."""
        # A child of a dead process may hold its end of the socket open, so the process is asked for too.
        exited = [member for member in self.members if member.process.poll() is not None]
        for key, _ in self._selector.select(seconds):
            key.data.read()
            if key.data.ended is not None:
                self._selector.unregister(key.fileobj)
        for member in exited:
            member.ended = member.ended or time.monotonic()

    def _failed(self, what: str) -> TrainingFailed:
        self._wait(SETTLE_SECONDS, lambda: any(member.ended and not member.aborted for member in self.members))
        guilty = min(self.members, key=lambda member: member.failed_first)
        head = f"{what} failed: {guilty.what_happened()}\n{guilty.evidence()}"
        raised = guilty.failure or {"types": (), "message": ""}
        failure = TrainingFailed(head + self._others(guilty), guilty.rank, raised["types"], raised["message"])
        return self._end_with(failure)

    def _late(self, what: str, seconds: float) -> TrainingFailed:
        head = f"{what} has not ended within {seconds:g} s"
        return self._end_with(TrainingTimeout(head + self._others(None)))

    def _others(self, guilty: Member | None) -> str:
        """Of every rank but one: phase and stack."""
        others = [member for member in self.members if member is not guilty]
        running = [m for m in others if m.ended is None and m.failure is None and m.stack_file.exists()]
        for member in running:
            member.process.send_signal(signal.SIGUSR1)
        sizes: list[list[int]] = []  # of the stack files; a dump that has not grown since is complete
        self._wait(STACK_SECONDS, lambda: _settled(sizes, [member.stack_file.stat().st_size for member in running]))
        return "".join(f"\n\n{member.what_happened()}\n{member.evidence()}" for member in others)

    def _wait(self, seconds: float, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            self._pump(0.02)
            time.sleep(0.02)

    def _end_with(self, failure: TrainingFailed) -> TrainingFailed:
        self.failure = failure
        self.end()
        return failure

    def end(self, grace: float = 0.0) -> None:
        """Let the processes exit by themselves for ``grace`` seconds, then kill them; free what they held. Idempotent.

        Processes that were told nothing do not exit by themselves.
        """
        if self._ended:
            return
        self._ended = True
        self._wait(grace, lambda: all(member.process.poll() is not None for member in self.members))
        for member in self.members:
            member.kill()
        for member in self.members:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it ends when that lets it go
                member.process.wait(timeout=EXIT_SECONDS)
            member.channel.connection.close()
        self._selector.close()


def _settled(history: list[list[int]], sizes: list[int]) -> bool:
    history.append(sizes)
    return all(sizes) and len(history) > 2 and history[-3] == sizes
