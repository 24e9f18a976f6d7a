"""Fixtures that several tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """``ranks.run(function, world_size, *args)``: what each rank of a gloo group returned."""
    return RankPool()


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """An engine makes the default group where there is none; the next file starts without one again."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
