"""One controller per run folder, enforced by the operating system, so that a killed one never leaves a lock behind."""

from __future__ import annotations

import fcntl
import os
import socket
from datetime import datetime
from pathlib import Path


class RunFolderInUse(RuntimeError):
    """Another process holds the run folder; the message says which and since when."""


class RunLock:
    """Holds ``<folder>/journal.lock`` until ``release`` or the end of the process.

    Raises:
        RunFolderInUse: on construction, when another holder is alive.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "journal.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 1024, 0).decode(errors="replace").strip() or "an unnamed process"
            os.close(self._file)
            raise RunFolderInUse(
                f"{folder} is in use by {holder}; wait for it to end, stop it, or choose another trial_name"
            ) from None
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
