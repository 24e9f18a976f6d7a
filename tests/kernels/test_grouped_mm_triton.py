"""The Triton kernels of the products by expert, in Triton's interpreter, against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moe_cases import counts_of, relative_error

from archon_kernels.grouped_mm import grouped_linear, grouped_swiglu

pytestmark = pytest.mark.slow  # the interpreter takes milliseconds per program

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # the interpreter cuts off bf16, thrice in a row here
GROUPS = {
    "uneven": [3, 0, 5, 1],
    "nothing": [0, 0, 0, 0],
    "one_each": [1, 1, 1, 1],
    "one_expert": [129],
    "skew": [2, 0, 127],
    "many_experts": counts_of(60, 128).tolist(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beyond", [0, 5], ids=["exact", "rows_beyond"])
@pytest.mark.parametrize(("groups", "width", "inner"), [("uneven", 7, 11), ("uneven", 40, 136), ("nothing", 8, 16),
                                                       ("one_each", 72, 8), ("one_expert", 24, 72), ("skew", 136, 24),
                                                       ("many_experts", 8, 3)])  # fmt: skip
@pytest.mark.parametrize("op", [grouped_linear, grouped_swiglu])
def test_triton_multiplies_as_the_reference(
    op: Callable[..., torch.Tensor],
    groups: str,
    width: int,
    inner: int,
    beyond: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    counts = GROUPS[groups]
    columns = inner if op is grouped_linear else 2 * inner
    rows = torch.randn(sum(counts) + beyond, width).to(dtype)
    rows[sum(counts) :] = float("nan")
    weight = torch.randn(len(counts), columns, width).to(dtype)
    pull = torch.randn(rows.shape[0], inner).to(dtype)
    results = []
    for name in ("triton", "reference"):
        monkeypatch.setenv("ARCHON_KERNELS", name)
        x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        out = op(x, w, torch.tensor(counts))
        out.backward(pull)
        assert not out[sum(counts) :].any() and not x.grad[sum(counts) :].any()
        results.append((out, x.grad, w.grad))
    for ours, right in zip(*results, strict=True):
        assert ours.dtype == right.dtype and ours.shape == right.shape
        assert relative_error(ours, right) <= TOLERANCE[dtype]
