"""Folders that appear under their name complete and durable, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a folder beside ``path``; on success it takes that name, on an error it is removed.

    Its files reach the disk before its name does, so a kill at any moment leaves the old folder or the new one. Where
    one of that name exists already it is moved aside until the new one has taken its place, then deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        work.chmod(0o755)
        yield work
        for file in work.rglob("*"):
            _fsync(file)
        _fsync(work)
        aside = work.with_name(work.name + ".old")
        if path.exists():
            path.rename(aside)
        work.rename(path)
        _fsync(path.parent)
        if aside.exists():
            shutil.rmtree(aside)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
