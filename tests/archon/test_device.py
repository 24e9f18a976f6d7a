"""What the engine asks of the machine it runs on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from archon.device import reuse_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

print(reuse_freed_memory() if sys.argv[1] == "reuse" else None)
torch.ones(1 << 24)  # 64 MiB
before = faults()
torch.ones(1 << 24)
print((faults() - before) * resource.getpagesize())
"""


def fresh_bytes(argument: str, **environment: str) -> tuple[str, int]:
    """What the call said, and how much of a second 64 MiB tensor lies in pages that the first one had not touched."""
    run = subprocess.run(
        [sys.executable, "-c", FAULTS, argument], env=os.environ | environment, capture_output=True, check=True
    )
    said, fresh = run.stdout.decode().split()
    return said, int(fresh)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's setting")
def test_freed_memory_is_used_again() -> None:
    said, fresh = fresh_bytes("reuse")
    assert said == "True" and fresh < 1 << 20
    assert fresh < fresh_bytes("default")[1]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's setting")
def test_the_users_own_setting_is_left_alone() -> None:
    assert fresh_bytes("reuse", MALLOC_MMAP_THRESHOLD_="65536")[0] == "False"
