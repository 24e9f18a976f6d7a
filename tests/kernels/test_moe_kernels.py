"""Routing, permutation and grouped matmul against plain dense formulas in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from archon_kernels.grouped_mm import grouped_linear
from archon_kernels.permute import combine, permute, sort_by_expert
from archon_kernels.routing import topk_gate

SHAPES = [(0, 4, 2), (1, 4, 2), (7, 5, 3), (31, 8, 1), (13, 3, 3)]  # tokens, experts, choices


def random_choices(tokens: int, experts: int, top_k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_gate_weighs_the_most_probable_experts(tokens: int, experts: int, top_k: int, renormalize: bool) -> None:
    logits = torch.randn(tokens, experts)
    weights, indices = topk_gate(logits, top_k, renormalize=renormalize)
    probs = logits.double().softmax(-1)
    order = probs.argsort(-1, descending=True)[:, :top_k]
    assert torch.equal(indices, order)
    expected = probs.gather(-1, order)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=0)


def test_gate_of_bf16_logits_is_computed_in_fp32() -> None:
    logits = torch.randn(9, 6).bfloat16()
    weights, indices = topk_gate(logits, 2, renormalize=True)
    expected, same = topk_gate(logits.float(), 2, renormalize=True)
    assert weights.dtype == torch.float32 and torch.equal(weights, expected) and torch.equal(indices, same)


@pytest.mark.parametrize("renormalize", [False, True])
def test_recorded_choices_are_weighed_by_the_current_logits(renormalize: bool) -> None:
    logits = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    recorded = random_choices(9, 6, 2)
    weights, indices = topk_gate(logits, 2, renormalize=renormalize, indices_TK=recorded)
    expected = logits.softmax(-1).gather(-1, recorded)
    expected = expected / expected.sum(-1, keepdim=True) if renormalize else expected
    assert torch.equal(indices, recorded)
    torch.testing.assert_close(weights, expected)
    _, own = topk_gate(logits, 2, renormalize=renormalize)
    assert torch.equal(
        topk_gate(logits, 2, renormalize=renormalize, indices_TK=own)[0].sort().values,
        topk_gate(logits, 2, renormalize=renormalize)[0].sort().values,
    )
    assert torch.autograd.gradcheck(lambda x: topk_gate(x, 2, renormalize=renormalize, indices_TK=recorded)[0], logits)


@pytest.mark.parametrize("renormalize", [False, True])
def test_recorded_choices_of_minus_one_leave_the_choice_to_the_gate(renormalize: bool) -> None:
    """By token, or by entry: then the entry holds what the gate would have chosen in its place."""
    logits, recorded = torch.randn(9, 6), random_choices(9, 6, 2)
    recorded[2:6] = -1
    recorded[7, 1] = -1
    own_weights, own = topk_gate(logits, 2, renormalize=renormalize)
    weights, indices = topk_gate(logits, 2, renormalize=renormalize, indices_TK=recorded)
    assert torch.equal(indices, torch.where(recorded == -1, own, recorded))
    assert torch.equal(weights[2:6], own_weights[2:6])
    alone, _ = topk_gate(logits, 2, renormalize=renormalize, indices_TK=indices)
    assert torch.equal(weights, alone)


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_selection_bias_moves_the_choice_and_not_the_weights(renormalize: bool) -> None:
    logits = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    bias = torch.tensor([0.0, 2.0, 0.0, -2.0, 0.0, 1.5])
    weights, indices = topk_gate(logits, 2, renormalize=renormalize, selection_bias_E=bias)
    assert torch.equal(indices, torch.tensor([[1, 5]]).expand(9, 2))  # a probability is at most 1
    expected, _ = topk_gate(logits, 2, renormalize=renormalize, indices_TK=indices)
    assert torch.equal(weights, expected)
    small = torch.tensor([0.0, 0.1, 0.0, -0.1, 0.05, 0.0])
    _, moved = topk_gate(logits, 2, renormalize=renormalize, selection_bias_E=small)
    assert torch.equal(moved, (logits.softmax(-1) + small).topk(2).indices)
    assert not torch.equal(moved, topk_gate(logits, 2, renormalize=renormalize)[1])

    def replayed(x: Tensor) -> Tensor:
        return topk_gate(x, 2, renormalize=renormalize, selection_bias_E=bias)[0]

    assert torch.autograd.gradcheck(replayed, logits)


def test_recorded_choices_win_over_a_selection_bias() -> None:
    logits, recorded, bias = torch.randn(9, 6), random_choices(9, 6, 2), torch.tensor([5.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    recorded[4:] = -1
    _, indices = topk_gate(logits, 2, renormalize=True, selection_bias_E=bias, indices_TK=recorded)
    assert torch.equal(indices[:4], recorded[:4]) and torch.equal(indices[4:], torch.tensor([[0, 1]]).expand(5, 2))


def test_recorded_choices_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(9, 3\).*\(9, 2\)"):
        topk_gate(torch.randn(9, 6), 2, renormalize=True, indices_TK=random_choices(9, 6, 3))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_sort_is_stable_and_inverts(tokens: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    indices = random_choices(tokens, experts, top_k, seed=tokens)
    order = sort_by_expert(indices, experts)
    pairs = sorted(range(tokens * top_k), key=lambda pair: (int(indices.flatten()[pair]), pair))
    assert order.source.tolist() == pairs
    assert torch.equal(order.source[order.position], torch.arange(tokens * top_k))
    assert torch.equal(order.counts, torch.bincount(indices.flatten(), minlength=experts))


@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_permute_and_combine_round_trip(tokens: int, experts: int, top_k: int) -> None:
    indices = random_choices(tokens, experts, top_k)
    order = sort_by_expert(indices, experts)
    hidden = torch.randn(tokens, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, top_k, dtype=torch.float64, requires_grad=True)
    rows = permute(hidden, order)
    assert torch.equal(rows, hidden[order.source // top_k])
    torch.testing.assert_close(combine(rows, weights, order), hidden * weights.sum(-1, keepdim=True))
    if tokens:
        assert torch.autograd.gradcheck(lambda x: permute(x, order), hidden)
        leaf = rows.detach().requires_grad_()
        assert torch.autograd.gradcheck(lambda r, w: combine(r, w, order), (leaf, weights))


def test_combine_of_bf16_rows_sums_in_fp32() -> None:
    order = sort_by_expert(random_choices(11, 4, 3), 4)
    rows, weights = torch.randn(33, 8).bfloat16(), torch.rand(11, 3)
    out = combine(rows, weights, order)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, combine(rows.float(), weights, order).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [17, 0, 0, 0], [0, 0, 0, 13], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize(("width", "inner"), [(8, 16), (7, 11), (8, 3)], ids=["aligned", "prime", "half_aligned"])
def test_grouped_linear_equals_one_matmul_per_expert(
    width: int, inner: int, counts: list[int], dtype: torch.dtype
) -> None:
    rows = torch.randn(sum(counts), width).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), inner, width).to(dtype).requires_grad_()
    out = grouped_linear(rows, weight, torch.tensor(counts))
    rows64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (rows, weight))
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    expected = torch.einsum("nd,nfd->nf", rows64, weight64[expert])
    pull = torch.randn(expected.shape, dtype=torch.float64)
    out.backward(pull.to(dtype))
    expected.backward(pull.to(dtype).double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    for ours, right in ((out, expected), (rows.grad, rows64.grad), (weight.grad, weight64.grad)):
        assert ours.dtype == dtype
        assert (ours.detach().double() - right).norm() <= tolerance * max(float(right.detach().norm()), 1.0)
