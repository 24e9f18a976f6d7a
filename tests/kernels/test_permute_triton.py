"""The Triton kernels of permute, in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from moe_cases import random_choices, relative_error

from archon_kernels.permute import combine, permute, sort_by_expert

pytestmark = pytest.mark.slow  # the interpreter takes milliseconds per program

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}  # the interpreter cuts off bf16 instead of rounding
CASES = [(0, 8, 2), (1, 1, 1), (1, 128, 8), (7, 8, 2), (7, 128, 1), (129, 8, 8), (129, 128, 2), (129, 128, 8)]


@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("skew", [False, True], ids=["spread", "one_expert"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), CASES)
def test_triton_sorts_as_the_reference(
    tokens: int, experts: int, top_k: int, skew: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    indices = torch.full((tokens, top_k), experts // 2) if skew else random_choices(tokens, experts, top_k)
    orders = []
    for name in ("triton", "reference"):
        monkeypatch.setenv("ARCHON_KERNELS", name)
        orders.append(sort_by_expert(indices, experts, tile))
    ours, right = orders
    assert torch.equal(ours.source, right.source) and torch.equal(ours.position, right.position)
    assert torch.equal(ours.counts, right.counts)


@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k", "width"), [(0, 8, 2, 8), (1, 1, 1, 1), (7, 8, 2, 1031),
                                                                   (129, 8, 8, 24), (129, 128, 2, 40)])  # fmt: skip
def test_triton_moves_and_sums_rows_as_the_reference(
    tokens: int,
    experts: int,
    top_k: int,
    width: int,
    dtype: torch.dtype,
    tile: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv("ARCHON_KERNELS", "reference")
    order = sort_by_expert(random_choices(tokens, experts, top_k), experts, tile)
    rows = order.source.shape[0]
    hidden, leaf, pull = torch.randn(tokens, width), torch.randn(rows, width), torch.randn(tokens, width)
    weights, pull_rows = torch.rand(tokens, top_k), torch.randn(rows, width)
    pull, pull_rows = pull.to(dtype), pull_rows.to(dtype)
    results = []
    for name in ("triton", "reference"):
        monkeypatch.setenv("ARCHON_KERNELS", name)
        x, r, w = hidden.to(dtype).requires_grad_(), leaf.to(dtype).requires_grad_(), weights.clone().requires_grad_()
        moved, out = permute(x, order), combine(r, w, order)
        moved.backward(pull_rows)
        out.backward(pull)
        results.append((moved, out, x.grad, r.grad, w.grad))
    for ours, right in zip(*results, strict=True):
        assert ours.dtype == right.dtype and ours.shape == right.shape
        assert relative_error(ours, right) <= TOLERANCE[ours.dtype]
