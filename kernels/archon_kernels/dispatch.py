"""Which implementation of an op runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

Op = TypeVar("Op")

IMPLEMENTATIONS = ("reference",)
"""Names of implementations, best first."""


def choose(implementations: Mapping[str, Op]) -> Op:
    """The best of an op's implementations, or the one that the environment variable ``ARCHON_KERNELS`` names.

    Args:
        implementations: from a name in ``IMPLEMENTATIONS`` to the op.

    Raises:
        ValueError: ``ARCHON_KERNELS`` names no implementation of this op.
    """
    wanted = os.environ.get("ARCHON_KERNELS")
    if wanted is None:
        return next(implementations[name] for name in IMPLEMENTATIONS if name in implementations)
    if wanted not in implementations:
        raise ValueError(f"ARCHON_KERNELS={wanted!r}: choose one of {sorted(implementations)}, or unset it")
    return implementations[wanted]
