"""Who computes on which cores, when trainer and engine live on one machine."""

from __future__ import annotations

import os


def share_cores(max_head_offpolicyness: int, engine_threads: int | None) -> tuple[int | None, int | None]:
    """Intra-op threads of the trainer and of the embedded engine.

    Synchronously they take turns, so each has all cores. Asynchronously they compute at the same time: more threads
    than cores would make each wait for the other inside every operation, which costs far more than it gains, so the
    cores are divided. OMP_NUM_THREADS, where it is set, decides instead.

    Args:
        max_head_offpolicyness: 0 is synchronous.
        engine_threads: what the recipe gives the engine; None leaves it to this function.

    Returns:
        (trainer, engine); None leaves torch's default.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None, engine_threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if max_head_offpolicyness == 0:
        return cores, engine_threads or cores
    engine = engine_threads or max(1, cores // 2)
    return max(1, cores - engine), engine
