"""Fixtures that several tests of the engine share."""

from __future__ import annotations

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """``ranks.run(function, world_size, *args)``: what each rank of a gloo group returned."""
    return RankPool()
