"""The Triton kernels of permute, in Triton's interpreter, against the plain formulas of test_permute.

Tolerances as there, but 8e-3 in bf16: the interpreter cuts bf16 off instead of rounding it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import noted, pairwise
from moe_cases import CHOICES, EXPERTS, assert_moves_and_sums, assert_sorts, choices

pytestmark = pytest.mark.slow  # the interpreter takes milliseconds per program

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
SHAPES: dict[str, Any] = {"tokens": (0, 1, 7, 129), "experts": EXPERTS, "top_k": CHOICES, "skewed": (False, True)}


def fits(experts: int, top_k: int, **_: Any) -> bool:
    return top_k <= experts


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "triton")


@pytest.mark.parametrize("tile", [1, 16])
def test_triton_sorts_stably(tile: int) -> None:
    for case in pairwise(fits, **SHAPES):
        with noted(**case):
            assert_sorts(choices(**case), case["experts"], tile)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_triton_moves_and_sums_rows(dtype: torch.dtype) -> None:
    for case in pairwise(fits, **SHAPES, tile=(1, 16), width=(24, 1031)):
        tile, width = case.pop("tile"), case.pop("width")
        if case["tokens"] == 129:
            width = min(width, 40)
        with noted(**case, tile=tile, width=width):
            assert_moves_and_sums(choices(**case), case["experts"], tile, dtype, TOLERANCE, width)
