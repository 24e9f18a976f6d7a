"""Ranks of one run: results by rank, the culprit named, and nothing left for the next run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import rank_pool
import torch
import torch.distributed as dist
from rank_pool import RankError, RankPool

POOL = RankPool()


def reduce_ranks(scale: float = 1.0) -> torch.Tensor:
    value = torch.tensor([scale * dist.get_rank(), 1.0])
    dist.all_reduce(value)
    return value


def describe() -> dict[str, Any]:
    template = Path(f"/proc/{os.getppid()}/task")
    return {
        "rank": dist.get_rank(),
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "draw": torch.rand(3),
        "template threads": len(list(template.iterdir())) if template.exists() else 1,
    }


def return_kinds() -> dict[str, Any]:
    weight = torch.ones(2, requires_grad=True)
    return {"bf16": torch.full((3,), 1.5, dtype=torch.bfloat16), "graph": weight * 2, "large": torch.ones(1_000_000)}


def fail_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        raise ValueError(f"no such expert on rank {culprit}")
    dist.barrier()


def fail_or_sleep() -> None:
    if dist.get_rank() == 0:
        pytest.fail("an outcome of pytest")
    time.sleep(60)


def die_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        os._exit(7)
    dist.barrier()


def mismatched_sizes() -> None:
    dist.all_reduce(torch.ones(4 + 1000 * dist.get_rank()))


def sleep_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        time.sleep(60)
    dist.barrier()


def return_a_lambda() -> Any:
    return lambda: None


def start_a_child(started: str) -> None:
    child = subprocess.Popen(["sleep", "60"])
    Path(started).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(60)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Any, seconds: float = 20.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture(autouse=True)
def next_run_works() -> Any:
    yield
    assert [result.tolist() for result in POOL.run(reduce_ranks, 2)] == [[1.0, 2.0]] * 2


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_results_come_by_rank(world_size: int) -> None:
    total = sum(range(world_size))
    results = POOL.run(reduce_ranks, world_size, scale=2.0)
    assert [result.tolist() for result in results] == [[2.0 * total, world_size]] * world_size


def test_ranks_are_alike_and_fresh() -> None:
    first, second = POOL.run(describe, 4), POOL.run(describe, 4)
    assert [rank["rank"] for rank in first] == [0, 1, 2, 3]
    assert len({rank["pid"] for rank in first + second}) == 8
    for rank in first + second:
        assert (rank["threads"], rank["omp"], rank["template threads"]) == (1, "1", 1)
        assert torch.equal(rank["draw"], first[0]["draw"])


def test_tensors_return_by_value() -> None:
    for result in POOL.run(return_kinds, 2):
        assert result["bf16"].dtype == torch.bfloat16 and result["bf16"].tolist() == [1.5] * 3
        assert result["graph"].tolist() == [2.0, 2.0]
        assert result["large"].sum() == 1_000_000


@pytest.mark.parametrize("culprit", [0, 3])
def test_an_exception_names_its_rank_and_not_the_peers_it_cut_off(culprit: int) -> None:
    with pytest.raises(
        RankError, match=f"rank {culprit} of 4 raised ValueError: no such expert on rank {culprit}"
    ) as e:
        POOL.run(fail_on, 4, culprit)
    assert e.value.rank == culprit
    assert 'raise ValueError(f"no such expert' in str(e.value)


def test_outcomes_of_pytest_are_failures_and_silent_ranks_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "_GRACE", 0.5)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0 of 2 raised Failed: an outcome of pytest(.|\n)*rank 1 ended"):
        POOL.run(fail_or_sleep, 2)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_dead_rank_is_named_with_its_exit_code(culprit: int) -> None:
    with pytest.raises(RankError, match=f"rank {culprit} of 4 died with exit code 7") as e:
        POOL.run(die_on, 4, culprit)
    assert e.value.rank == culprit


def test_mismatched_sizes_fail_the_run_only() -> None:
    with pytest.raises(RankError, match="rank . of 2 (died with exit code -6|raised )"):
        POOL.run(mismatched_sizes, 2, deadline=10.0)


def test_the_deadline_shows_where_every_rank_is() -> None:
    with pytest.raises(RankError, match="ranks 0, 1, 2 of 3 did not return from .*sleep_on in 1 s") as e:
        POOL.run(sleep_on, 3, 1, deadline=1.0)
    by_rank = str(e.value).split("--- rank ")[1:]
    assert ["in barrier" in stack for stack in by_rank] == [True, False, True]
    assert all("in sleep_on" in stack for stack in by_rank)


def test_a_result_that_cannot_be_sent_is_an_exception_of_its_rank() -> None:
    with pytest.raises(RankError, match="rank . of 2 raised .*lambda"):
        POOL.run(return_a_lambda, 2)


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        POOL.run(lambda: None, 2)


@pytest.mark.parametrize("world_size", [0, 9])
def test_worlds_beyond_the_pool_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size {world_size} is not in 1..8"):
        POOL.run(reduce_ranks, world_size)


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="did not return"):
        POOL.run(start_a_child, 1, str(tmp_path / "pids"), deadline=1.0)
    assert wait_until(lambda: not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split()))


def test_ranks_end_with_a_killed_parent() -> None:
    with tempfile.TemporaryDirectory() as folder:  # holds what the parent cannot remove; its path is short for sockets
        pids = Path(folder) / "pids"
        script = f"import test_rank_pool as t; t.POOL.run(t.start_a_child, 1, {str(pids)!r})"
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": folder}
        parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **variables})
        try:
            assert wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, seconds=60.0)
        finally:
            parent.kill()
            parent.wait()
        assert wait_until(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()))
