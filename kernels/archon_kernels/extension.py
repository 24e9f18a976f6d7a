"""Builds the C++ ops of ``csrc/`` on first use, keeps them in a cache, and loads them as ``torch.ops.archon_cpp``.

    python -m archon_kernels.extension

builds them ahead of the first use, on a machine like the one they will run on, and prints where they are.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "ARCHON_CACHE_DIR"
BUILD_SECONDS = 600.0  # for each call of the compiler
WAIT_SECONDS = 2 * BUILD_SECONDS  # another process compiles, then links
SOURCE_FOLDER = Path(__file__).parent / "csrc"
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-march=native", "-fno-math-errno", "-fno-trapping-math")


def load() -> bool:
    """Whether the C++ ops are there, after building them if need be.

    The first call of a process says once, as a warning, why they are not; the reference implementations run instead.
    """
    return problem() is None


@functools.cache
def problem() -> str | None:
    """Why the C++ ops are not loaded, or None if they are."""
    try:
        torch.ops.load_library(str(build()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = f"{error}"
        logger.warning("the C++ kernels are not used, plain torch runs instead: %s", reason)
        return reason
    return None


def build() -> Path:
    """The shared library for these sources, this torch and this processor; built if the cache has none.

    Which compiler built it does not count, so that a library built at install loads where there is no compiler; to try
    another compiler, give it a cache of its own.

    Processes that need the same library wait for the one that builds it, and share its failure. If it is killed, the
    next builds anew and clears away what it left.

    Raises:
        RuntimeError: there are no sources, there is no compiler that fits, or it fails; the message holds its last
            words.
        TimeoutError: another process holds the lock for longer than a build may take.
    """
    sources = sorted(SOURCE_FOLDER.glob("*.cpp"))
    if not sources:
        raise RuntimeError(f"there are no C++ sources in {SOURCE_FOLDER}")
    folder = cache_folder()
    library = folder / f"archon_cpp_{_fingerprint()}.so"
    if library.exists():
        return library
    compiler = _compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("a+") as lock:
        asked = _read(lock)
        _acquire(lock)
        if library.exists():
            return library
        # The file holds who built last and, on further lines, how that failed. If it is not what it was, that was while
        # this process waited. Times would not do: the clocks of machines that share the folder differ.
        if (last := _read(lock)) != asked and (failure := last.partition("\n")[2]):
            raise RuntimeError(failure.strip())
        for leftover in folder.glob(f"{library.stem}.build_*"):
            shutil.rmtree(leftover)
        lock.truncate(0)
        print(f"process {os.getpid()} on {platform.node()} since {datetime.now():%F %T.%f}", file=lock, flush=True)
        try:
            _compile(compiler, sources, library)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(error, file=lock, flush=True)
            raise
    return library


def _acquire(lock: TextIO) -> None:
    """Take the lock, which the system frees if its holder dies; says once whom it waits for, and not for ever."""
    deadline = time.monotonic() + WAIT_SECONDS
    said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = (_read(lock).splitlines() or ["another process"])[0]
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"waited {WAIT_SECONDS:g} s for {lock.name}, held by {holder}; end that process, or delete the file if "
                f"its machine is gone, or set {CACHE_VARIABLE} to another folder"
            )
        if not said:
            logger.warning("waiting up to %g s for the C++ kernels, built by %s: %s", WAIT_SECONDS, holder, lock.name)
            said = True
        time.sleep(0.1)


def _read(lock: TextIO) -> str:
    lock.seek(0)
    return lock.read()


def cache_folder() -> Path:
    """``$ARCHON_CACHE_DIR``, else ``archon`` in the user's cache folder."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "archon"


def _compiler() -> list[str]:
    """``$CXX``, which may hold options, else g++, whose OpenMP runtime is torch's."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    found = next(filter(None, map(shutil.which, ("g++", "c++"))), None)
    if found is None:
        raise RuntimeError("there is no C++ compiler; install g++, or set CXX")
    return [found]


def _compile(compiler: list[str], sources: list[Path], library: Path) -> None:
    """Compile and link in a folder beside the library, then move it into place, so that it is there whole or not."""
    torch_folder = Path(torch.__file__).parent
    include, lib = torch_folder / "include", torch_folder / "lib"
    flags = [*_FLAGS, f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    # A second OpenMP runtime would bring threads of its own: torch ships one, under a name that is not always the
    # system's.
    openmp = sorted(map(str, lib.glob("libgomp*.so*"))) or ["-fopenmp"]
    if openmp != ["-fopenmp"] and "Free Software Foundation" not in _run([*compiler, "--version"]):
        raise RuntimeError(f"{compiler[0]} is not GNU's: its threads need another OpenMP runtime; set CXX to a g++")
    logger.info("building the C++ kernels, once for this machine: %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.build_") as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        commands = [
            [*compiler, *flags, "-c", str(source), "-o", str(output)]
            for source, output in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        output = Path(scratch) / library.name
        link = [*compiler, "-shared", *map(str, objects), f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"]
        _run([*link, *openmp, "-o", str(output)])
        output.replace(library)


def _run(command: list[str]) -> str:
    """What the compiler prints.

    Raises:
        RuntimeError: it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise RuntimeError(f"the C++ compiler {command[0]} failed with code {done.returncode} {' | '.join(errors[:5])}")
    return done.stdout


def _fingerprint() -> str:
    """Changes with whatever the library must fit: sources, flags, torch, processor."""
    parts = [torch.__version__, platform.machine(), *_FLAGS, _processor()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(SOURCE_FOLDER.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Model and features, on which ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(build())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        sys.exit(f"the C++ kernels cannot be built: {error}")


if __name__ == "__main__":
    main()
