"""Inputs that the tests of the mixture-of-experts kernels share, plain formulas for them, and what is compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from archon_kernels.grouped_mm import grouped_linear, grouped_swiglu
from archon_kernels.permute import combine, permute, sort_by_expert

TOKENS, EXPERTS, CHOICES = (0, 1, 7, 129, 1000), (1, 8, 128), (1, 2, 8)
SIZES = [(experts, top_k) for experts in EXPERTS for top_k in CHOICES if top_k <= experts]


def random_choices(tokens: int, experts: int, top_k: int, seed: int = 0) -> Tensor:
    """``[T, K]`` different experts of each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]


def choices(tokens: int, experts: int, top_k: int, skewed: bool) -> Tensor:
    """``[T, K]`` different experts of each token, or the same one for all of them."""
    return torch.full((tokens, top_k), experts // 2) if skewed else random_choices(tokens, experts, top_k)


def counts_of(rows: int, experts: int, seed: int = 0) -> Tensor:
    """Rows of each expert, as a router would spread them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.bincount(torch.randint(experts, (rows,), generator=generator), minlength=experts)


def relative_error(ours: Tensor, right: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is right or, where that is below 1, as it is."""
    right = right.detach().double()
    return float((ours.detach().double() - right).norm() / max(float(right.norm()), 1.0))


def assert_sorts(indices_TK: Tensor, experts: int, tile: int) -> None:
    """Source, position and counts equal those of plain lists."""
    pairs: list[list[int]] = [[] for _ in range(experts)]
    for pair, expert in enumerate(indices_TK.flatten().tolist()):
        pairs[expert].append(pair)
    padded = [part + [-1] * (-len(part) % tile) for part in pairs]
    source = [pair for part in padded for pair in part]
    order = sort_by_expert(indices_TK, experts, tile)
    rows = order.source.shape[0]
    assert rows == indices_TK.numel() if tile == 1 else rows % tile == 0 and rows >= len(source)
    assert order.source.tolist() == source + [-1] * (rows - len(source))
    assert order.counts.tolist() == [len(part) for part in padded]
    assert torch.equal(order.source[order.position], torch.arange(indices_TK.numel()))


def assert_moves_and_sums(
    indices_TK: Tensor, experts: int, tile: int, dtype: torch.dtype, tolerances: dict[torch.dtype, float], width: int
) -> None:
    """permute and combine, and their gradients, equal plain formulas in fp64; filler holds NaN before combine."""
    tokens, top_k = indices_TK.shape
    generator = torch.Generator().manual_seed(tokens)
    order = sort_by_expert(indices_TK, experts, tile)
    shape = (order.source.shape[0], width)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(tokens, top_k, generator=generator).requires_grad_()
    rows = permute(hidden, order)
    real = order.source >= 0
    assert torch.equal(rows[real], hidden[order.source[real] // top_k])
    assert not rows[~real].any()

    leaf = torch.randn(shape, generator=generator).to(dtype).masked_fill_(~real.unsqueeze(-1), torch.nan)
    leaf.requires_grad_()
    out = combine(leaf, weights, order)
    leaf64, weights64, hidden64 = (x.detach().double().requires_grad_() for x in (leaf, weights, hidden))
    right = (leaf64[order.position].unflatten(0, (tokens, top_k)) * weights64.unsqueeze(-1)).sum(1)
    pull = torch.randn(tokens, width, generator=generator).to(dtype)
    out.backward(pull)
    right.backward(pull.double())
    pull = torch.randn(shape, generator=generator).to(dtype)
    rows.backward(pull)
    hidden64[order.source[real] // top_k].backward(pull[real].double())
    assert rows.dtype == out.dtype == hidden.grad.dtype == leaf.grad.dtype == dtype
    for ours, wanted in ((out, right), *((x.grad, y.grad) for x, y in ((leaf, leaf64), (weights, weights64)))):
        assert relative_error(ours, wanted) <= tolerances[ours.dtype]
    assert relative_error(hidden.grad, hidden64.grad) <= tolerances[dtype]


def plain_linear(rows_ND: Tensor, weight_EFD: Tensor, counts: list[int]) -> Tensor:
    parts = rows_ND[: sum(counts)].split(counts)
    products = [part @ weight.T for part, weight in zip(parts, weight_EFD, strict=True)]
    return torch.cat([*products, rows_ND.new_zeros(rows_ND.shape[0] - sum(counts), weight_EFD.shape[1])])


def plain_swiglu(rows_ND: Tensor, gate_up_EFD: Tensor, counts: list[int]) -> Tensor:
    gate, up = plain_linear(rows_ND, gate_up_EFD, counts).chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


PRODUCTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "linear": (grouped_linear, plain_linear, 1),
    "swiglu": (grouped_swiglu, plain_swiglu, 2),
}
"""The ops that multiply by expert, what they stand for, and how many products they make."""


def assert_multiplies(
    op: str, counts: list[int], width: int, inner: int, beyond: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Result and gradients equal one product per expert in fp64; rows beyond the counts hold NaN and get nothing."""
    ours_of, right_of, halves = PRODUCTS[op]
    generator = torch.Generator().manual_seed(0)
    used = sum(counts)
    rows = torch.randn(used + beyond, width, generator=generator).to(dtype)
    rows64 = rows.to(torch.float64, copy=True).requires_grad_()
    rows[used:] = torch.nan
    rows.requires_grad_()
    weight = torch.randn(len(counts), halves * inner, width, generator=generator).to(dtype).requires_grad_()
    weight64 = weight.detach().double().requires_grad_()
    out, right = ours_of(rows, weight, torch.tensor(counts)), right_of(rows64, weight64, counts)
    pull = torch.randn(right.shape, generator=generator).to(dtype)
    out.backward(pull)
    right.backward(pull.double())
    assert not out[used:].any() and not rows.grad[used:].any()
    for ours, wanted in ((out, right), (rows.grad, rows64.grad), (weight.grad, weight64.grad)):
        assert ours.dtype == dtype and relative_error(ours, wanted) <= tolerance
