"""linear_logprob with its Triton passes in the interpreter, against fp64; tolerances as in test_linear_logprob."""

from __future__ import annotations

import pytest
import torch
from cases import noted, pairwise
from logprob_cases import LARGE, MASKS, problem

from archon_kernels import logprob_tiles

pytestmark = pytest.mark.slow  # the interpreter takes milliseconds per program

CASES = pairwise(
    rows=(0, 1, 7, 129), vocab=(13, 1009), masked=MASKS, plain=(True, False), dtype=(torch.float32, torch.bfloat16)
)


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "triton")


@pytest.mark.parametrize(("rows", "vocab", "masked", "plain", "dtype"), [case.values() for case in CASES])
def test_triton_equals_fp64(rows: int, vocab: int, masked: str, plain: bool, dtype: torch.dtype) -> None:
    problem(rows, vocab, dtype, masked, plain=plain).check()


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "every_option"])
def test_triton_over_a_large_vocabulary_equals_fp64(plain: bool) -> None:
    problem(7, LARGE, torch.float32, plain=plain).check()


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "every_option"])
def test_triton_over_several_tiles_equals_fp64(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_tiles, "TILE_ROWS", 5)
    for masked in MASKS:
        with noted(masked=masked):
            problem(13, 101, torch.float32, masked, plain=plain).check(tile_elements=5 * 40)


def test_triton_in_fp64_is_exact() -> None:
    """Statistics take the type of what they are summed in, so fp64 is not rounded to fp32 on the way."""
    problem(5, 11, torch.float64, plain=True).check()
