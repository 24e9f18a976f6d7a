"""Folders that appear under their name complete and durable, or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_NEW, _OLD = ".new", ".old"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a folder beside ``path``; on success it takes that name, on an error it is removed.

    Its files reach the disk before its name does, so a kill at any moment leaves the old folder or the new one. One
    writer per name at a time: what a killed writer of this name left behind is removed by the next one.
    """
    work = make_work_folder(path)
    try:
        yield work
        for file in work.rglob("*"):
            fsync(file)
        fsync(work)
        replace_folder(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def make_work_folder(path: Path) -> Path:
    """An empty folder beside ``path``, hidden and with a name of its own, to fill before ``replace_folder``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_NEW, dir=path.parent))
    work.chmod(0o755)
    return work


def replace_folder(work: Path, path: Path) -> None:
    """Give ``work``, whose content is on the disk, the name ``path``; delete the folder that had it before.

    The two names are exchanged in one step where the filesystem can do that (ext4, xfs, btrfs, tmpfs). Elsewhere (NFS)
    the old folder is moved aside first, and a kill between the two renames leaves it under its hidden name.
    """
    if not os.path.lexists(path):
        work.rename(path)
    elif not _exchange(work, path):
        aside = work.with_name(work.name + _OLD)
        path.rename(aside)
        try:
            work.rename(path)
        except OSError:
            aside.rename(path)
            raise
    fsync(path.parent)
    for left_over in _work_folders(path):
        shutil.rmtree(left_over, ignore_errors=True)


def fsync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step (Linux renameat2); False where the system or the filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _work_folders(path: Path) -> list[Path]:
    """Folders beside ``path`` that hold its replacement in the making, or what it replaced."""
    # The random middle has no dot: ".step_1.b.x7k2m9qd.new" belongs to a folder "step_1.b".
    name = re.compile(rf"\.{re.escape(path.name)}\.[^.]+{re.escape(_NEW)}({re.escape(_OLD)})?")
    return [folder for folder in path.parent.iterdir() if name.fullmatch(folder.name)]
