"""How a rank of ``layouts_cpu.py`` times its steps. Imports only torch: contenders run in environments of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def measure(step: Callable[[], float], count: int, **more: Any) -> None:
    """Seconds of ``count`` steps after one to warm up, and the loss of that one; then end the process group.

    Rank 0 prints its own seconds, and the processor time of a step over all ranks, which other work on the machine does
    not lengthen.
    """
    first, seconds, processor = step(), [], []
    for _ in range(count):
        start, used = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    used_by_all = torch.tensor(processor)
    dist.all_reduce(used_by_all)
    if dist.get_rank() == 0:
        found = {"seconds": seconds, "processor_seconds": used_by_all.tolist(), "loss": first, **more}
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
