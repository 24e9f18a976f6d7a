"""What this process is doing now, kept where another process can read it after this one hangs or dies.

``ARCHON_PHASE_FILE`` names a small file that is mapped into memory: setting a phase is a write into that memory (under
2 µs, no system call), and the operating system keeps what was written whatever ends the process. Without the variable
only this process knows its phase.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT_VARIABLE = "ARCHON_PHASE_FILE"
_RECORD = struct.Struct("=dq48s")
"""Seconds of the monotonic clock, which all processes of a machine share; micro-batch or -1; name in UTF-8."""


@dataclass(frozen=True)
class Phase:
    """One phase of one process.

    Attributes:
        name: such as ``forward/backward``; cut to 48 bytes in the file.
        micro_batch: number of the micro-batch, or None.
        since: ``time.monotonic()`` at its start.
    """

    name: str
    micro_batch: int | None
    since: float

    def __str__(self) -> str:
        return self.name if self.micro_batch is None else f"{self.name} of micro-batch {self.micro_batch}"


def _map(path: str | None) -> mmap.mmap | None:
    if path is None:
        return None
    with open(path, "w+b") as file:
        file.truncate(_RECORD.size)
        return mmap.mmap(file.fileno(), _RECORD.size)


_name, _micro_batch, _since = "start", -1, time.monotonic()
_memory = _map(os.environ.pop(ENVIRONMENT_VARIABLE, None))  # popped: a child process has phases of its own


def set(name: str, micro_batch: int | None = None) -> None:
    """Enter a phase."""
    _enter(name, -1 if micro_batch is None else micro_batch)


def _enter(name: str, micro_batch: int) -> None:
    global _name, _micro_batch, _since
    _name, _micro_batch, _since = name, micro_batch, time.monotonic()
    if _memory is not None:
        _RECORD.pack_into(_memory, 0, _since, micro_batch, name.encode())


def now() -> Phase:
    """The phase of this process."""
    return Phase(_name, None if _micro_batch < 0 else _micro_batch, _since)


class of:
    """A phase for the length of a ``with`` block; the one before it comes back.

    After an exception it does not: the phase stays the one that failed, for whoever reports the failure.
    """

    __slots__ = ("_before", "_phase")

    def __init__(self, name: str, micro_batch: int | None = None) -> None:
        self._phase = (name, -1 if micro_batch is None else micro_batch)

    def __enter__(self) -> None:
        self._before = (_name, _micro_batch)
        _enter(*self._phase)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            _enter(*self._before)


def read(path: str | Path) -> Phase | None:
    """The latest phase of the process that was started with ``path``; None before it entered one."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    if len(content) != _RECORD.size or not content.strip(b"\0"):
        return None
    since, micro_batch, name = _RECORD.unpack(content)
    return Phase(name.rstrip(b"\0").decode(errors="replace"), None if micro_batch < 0 else micro_batch, since)


_enter(_name, _micro_batch)
