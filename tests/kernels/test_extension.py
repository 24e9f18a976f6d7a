"""Building, caching and loading the C++ ops."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from archon_kernels import extension
from archon_kernels.permute import sort_by_expert

ROOT = Path(__file__).resolve().parents[2]
SOURCE = 'extern "C" int archon_answer() { return 42; }\n'
BUILD = """
import ctypes, sys
from pathlib import Path
from archon_kernels import extension
extension.SOURCE_FOLDER = Path(sys.argv[1])
extension.WAIT_SECONDS = float(sys.argv[2])
library = extension.build()
assert ctypes.CDLL(str(library)).archon_answer() == 42
print(library)
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="builds with g++, as on Linux"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """One small source, which takes no seconds to compile as the real ones do."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    return folder


def compiler(folder: Path, script: str) -> Path:
    """A compiler that runs ``script`` before g++ at every call but ``--version``, and notes each source."""
    path = folder / "compiler"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" != --version ]; then\n'
        f'for word; do case "$word" in *.cpp) echo "$word" >> {folder}/compiled;; esac; done\n{script}\nfi\n'
        'exec g++ "$@"\n'
    )
    path.chmod(0o755)
    return path


def start(sources: Path, cache: Path, wait: float = 60, **environment: str) -> subprocess.Popen[str]:
    python_path = os.pathsep.join([str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"ARCHON_CACHE_DIR": str(cache), "PYTHONPATH": python_path} | environment
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(sources), str(wait)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out.strip()


def wait_until(there: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def test_many_processes_build_once(sources: Path, tmp_path: Path) -> None:
    slow = compiler(tmp_path, "sleep 1")
    children = [start(sources, tmp_path / "cache", CXX=str(slow)) for _ in range(3)]
    assert len({finish(child) for child in children}) == 1
    assert (tmp_path / "compiled").read_text().count("answer.cpp") == 1
    assert not list((tmp_path / "cache").glob("*.build_*"))


def test_a_killed_build_leaves_nothing_that_blocks_or_half_loads(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    # Writes half a library under every name it may be told, then hangs as if it were still at work.
    half = 'for word; do case "$word" in *.o|*.so) echo half > "$word";; esac; done'
    stuck = compiler(tmp_path, f"{half}; touch {tmp_path}/stuck; sleep 60")
    child = start(sources, cache, CXX=str(stuck))
    wait_until((tmp_path / "stuck").exists, child)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=10)
    assert list(cache.glob("*.build_*")) and not list(cache.glob("*.so"))
    compiler(tmp_path, "")
    finish(start(sources, cache, CXX=str(stuck)))
    assert len(list(cache.glob("*.so"))) == 1 and not list(cache.glob("*.build_*"))


def test_a_library_built_at_install_loads_where_there_is_no_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "SOURCE_FOLDER", sources)
    monkeypatch.setenv("ARCHON_CACHE_DIR", str(tmp_path / "cache"))
    library = extension.build()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert extension.build() == library
    monkeypatch.setenv("ARCHON_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(RuntimeError, match="there is no C\\+\\+ compiler"):
        extension.build()


def test_a_process_that_waits_says_for_whom_and_gives_up(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    stuck = compiler(tmp_path, f"touch {tmp_path}/stuck; sleep 60")
    builder = start(sources, cache, CXX=str(stuck))
    wait_until((tmp_path / "stuck").exists, builder)
    waiting = start(sources, cache, wait=0.3, CXX=str(stuck))
    _, errors = waiting.communicate(timeout=60)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.communicate(timeout=10)
    (lock,) = cache.glob("*.lock")
    holder = f"process {builder.pid} on {platform.node()} since "
    assert waiting.returncode == 1 and errors.count("waiting up to 0.3 s for") == 1
    assert f"built by {holder}" in errors and f"waited 0.3 s for {lock}, held by {holder}" in errors
    assert "ARCHON_CACHE_DIR" in errors


def test_changed_sources_are_built_anew(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "SOURCE_FOLDER", sources)
    monkeypatch.setenv("ARCHON_CACHE_DIR", str(tmp_path / "cache"))
    first = extension.build()
    assert extension.build() == first
    (sources / "common.h").write_text("// a header counts too\n")
    second = extension.build()
    assert second != first and first.exists() and second.exists()


def test_processes_that_wait_for_a_failing_build_share_its_failure(sources: Path, tmp_path: Path) -> None:
    """Who comes later builds anew, though the failure is there, from a clock that is ahead."""
    cache = tmp_path / "cache"
    broken = compiler(tmp_path, f"touch {tmp_path}/at_work; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; exit 3")
    builder = start(sources, cache, CXX=str(broken))
    wait_until((tmp_path / "at_work").exists, builder)
    waiting = start(sources, cache, CXX=str(broken))
    said = waiting.stderr.readline() if waiting.stderr else ""
    assert "waiting" in said
    (tmp_path / "go").touch()
    for child in (builder, waiting):
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 1 and f"RuntimeError: the C++ compiler {broken} failed with code 3" in errors
    assert (tmp_path / "compiled").read_text().count("answer.cpp") == 1
    (lock,) = cache.glob("*.lock")
    os.utime(lock, (time.time() + 3600,) * 2)
    compiler(tmp_path, "")
    finish(start(sources, cache, CXX=str(broken)))
    assert (tmp_path / "compiled").read_text().count("answer.cpp") == 2


def test_a_compiler_with_another_openmp_runtime_is_refused(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\necho clang version 14.0.6\n")
    clang.chmod(0o755)
    monkeypatch.setattr(extension, "SOURCE_FOLDER", sources)
    monkeypatch.setenv("ARCHON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(clang))
    with pytest.raises(RuntimeError, match=rf"{re.escape(str(clang))} is not GNU's.*set CXX to a g\+\+"):
        extension.build()


def test_a_broken_compiler_is_reported_once_and_the_reference_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("ARCHON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ARCHON_KERNELS", raising=False)
    extension.problem.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger=extension.__name__):
            for _ in range(2):
                order = sort_by_expert(torch.tensor([[1, 0], [0, 2]]), 3)
        assert order.source.tolist() == [1, 2, 0, 3]
        (record,) = caplog.records
        assert "plain torch runs instead" in record.message and "/bin/false failed with code 1" in record.message
    finally:
        extension.problem.cache_clear()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CXX": "/no/such/compiler"}, "/no/such/compiler"),
        ({"PATH": "/no/such/folder"}, "there is no C++ compiler; install g++, or set CXX"),
        ({"ARCHON_CACHE_DIR": "/proc/nowhere"}, "/proc/nowhere"),
    ],
    ids=["missing", "none", "read_only_cache"],
)
def test_building_from_the_command_line_says_what_is_missing(
    variables: dict[str, str], reason: str, tmp_path: Path
) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "CXX"} | {"ARCHON_CACHE_DIR": str(tmp_path)}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), kept.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "archon_kernels.extension"],
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "cannot be built" in done.stderr and reason in done.stderr
    assert "Traceback" not in done.stderr


def test_building_from_the_command_line_prints_where() -> None:
    library = extension.build()
    command = [sys.executable, "-m", "archon_kernels.extension"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == str(library)
    assert done.stderr == ""  # nothing was left to build


THREADS = """
import os, sys, torch
from archon_kernels import extension
from archon_kernels.permute import permute, sort_by_expert

assert extension.load(), extension.problem()
if len(sys.argv) > 1:
    torch.set_num_threads(int(sys.argv[1]))

def threads():
    return len(os.listdir("/proc/self/task"))

hidden, order = torch.empty(4096, 256), sort_by_expert(torch.zeros(4096, 1, dtype=torch.long), 1)
before = threads()
permute(hidden, order)
ours = threads()
hidden.zero_()
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}
print(ours - before, threads() - ours, *runtimes)
"""


@pytest.mark.parametrize(("environment", "chosen", "workers"), [("1", [], 0), ("2", [], 1), ("2", ["4"], 3)])
def test_cpp_and_torch_share_one_openmp_runtime_and_its_threads(
    environment: str, chosen: list[str], workers: int
) -> None:
    """Our op starts the workers that torch is told to use, and torch's next op finds them there."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS, *chosen],
        env=os.environ | {"OMP_NUM_THREADS": environment, "ARCHON_KERNELS": "cpp"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    ours, torchs, runtime = done.stdout.split()
    assert (int(ours), int(torchs)) == (workers, 0)
    assert Path(runtime).parent == Path(torch.__file__).parent / "lib"


def test_an_installed_wheel_brings_its_sources(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("archon", "areal", "kernels", "csrc"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(tree)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    code = (
        "from archon_kernels import extension\n"
        "print(*sorted(path.name for path in extension.SOURCE_FOLDER.iterdir()), extension.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    *names, module = done.stdout.split()
    assert Path(module).is_relative_to(installed)
    assert names == sorted(path.name for path in (ROOT / "csrc").iterdir())
