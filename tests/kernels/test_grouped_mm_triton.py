"""The Triton kernels of the products by expert, in Triton's interpreter, against one product per expert in fp64.

Tolerances of the norm of a result or gradient: fp32 2e-6, bf16 2e-2, which the interpreter cuts off instead of
rounding, thrice in a row here.
"""

from __future__ import annotations

import pytest
import torch
from cases import noted, pairwise
from moe_cases import CHOICES, EXPERTS, PRODUCTS, assert_multiplies, choices

pytestmark = pytest.mark.slow  # the interpreter takes milliseconds per program

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
GROUPS = {
    "uneven": [3, 0, 5, 1],
    "nothing": [0, 0, 0, 0],
    "one_each": [1, 1, 1, 1],
    "one_expert": [129],
    "skew": [2, 0, 127],
}


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "triton")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("groups", "width", "inner"),
    [
        ("uneven", 7, 11),
        ("uneven", 40, 136),
        ("nothing", 8, 16),
        ("one_each", 72, 8),
        ("one_expert", 24, 72),
        ("skew", 136, 24),
    ],
)
@pytest.mark.parametrize("op", PRODUCTS)
def test_triton_multiplies(op: str, groups: str, width: int, inner: int, dtype: torch.dtype) -> None:
    for beyond in (0, 5):
        with noted(beyond=beyond):
            assert_multiplies(op, GROUPS[groups], width, inner, beyond, dtype, TOLERANCE[dtype])


ROUTED = pairwise(
    lambda experts, top_k, **_: top_k <= experts,
    op=tuple(PRODUCTS),
    tokens=(0, 1, 7, 129),
    experts=EXPERTS,
    top_k=CHOICES,
    skewed=(False, True),
    dtype=tuple(TOLERANCE),
)


@pytest.mark.parametrize(("op", "tokens", "experts", "top_k", "skewed", "dtype"), [case.values() for case in ROUTED])
def test_triton_multiplies_routed_tokens(
    op: str, tokens: int, experts: int, top_k: int, skewed: bool, dtype: torch.dtype
) -> None:
    counts = torch.bincount(choices(tokens, experts, top_k, skewed).flatten(), minlength=experts).tolist()
    assert_multiplies(op, counts, 8, 5, 3, dtype, TOLERANCE[dtype])
