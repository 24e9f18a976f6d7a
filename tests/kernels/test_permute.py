"""Sorting rows by expert and combining them, reference and C++, against plain formulas in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import random_choices, relative_error
from torch import Tensor

from archon_kernels import extension
from archon_kernels.permute import ExpertOrder, _combine, _permute, _sort_by_expert, combine, permute, sort_by_expert

TOKENS, EXPERTS, CHOICES = (0, 1, 7, 129, 1000), (1, 8, 128), (1, 2, 8)
SHAPES = [(t, e, k) for t in TOKENS for e in EXPERTS for k in CHOICES if k <= e]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-14}


@pytest.fixture(params=["reference", "cpp"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpp" and not extension.load():
        pytest.skip(f"no C++ ops: {extension.problem()}")
    monkeypatch.setenv("ARCHON_KERNELS", request.param)
    return request.param


def plain_order(indices_TK: Tensor, experts: int, tile: int) -> tuple[list[int], list[int]]:
    """Source of each row up to the last expert's, and counts, by lists."""
    source, counts = [], []
    flat = indices_TK.flatten().tolist()
    for expert in range(experts):
        pairs = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        counts.append(-(-len(pairs) // tile) * tile)
        source += pairs + [-1] * (counts[-1] - len(pairs))
    return source, counts


@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_sort_is_stable_and_inverts(tokens: int, experts: int, top_k: int, tile: int, implementation: str) -> None:
    indices = random_choices(tokens, experts, top_k)
    order = sort_by_expert(indices, experts, tile)
    source, counts = plain_order(indices, experts, tile)
    rows = order.source.shape[0]
    assert rows == tokens * top_k if tile == 1 else rows % tile == 0 and rows >= len(source)
    assert order.source.tolist() == source + [-1] * (rows - len(source))
    assert order.counts.tolist() == counts
    assert torch.equal(order.source[order.position], torch.arange(tokens * top_k))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 5), st.data())
def test_the_static_number_of_rows_suffices_for_any_choices(
    tokens: int, experts: int, tile: int, data: st.DataObject
) -> None:
    choices = data.draw(st.lists(st.integers(0, experts - 1), min_size=tokens, max_size=tokens))
    indices = torch.tensor(choices, dtype=torch.long).reshape(tokens, 1)
    order = sort_by_expert(indices, experts, tile)
    source, counts = plain_order(indices, experts, tile)
    assert order.counts.tolist() == counts and order.source[: len(source)].tolist() == source
    assert bool((order.source[len(source) :] == -1).all())


@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("skew", [False, True], ids=["spread", "one_expert"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_permute_and_combine_equal_plain_formulas(
    tokens: int, experts: int, top_k: int, skew: bool, dtype: torch.dtype, tile: int, implementation: str
) -> None:
    torch.manual_seed(tokens)
    width = 24
    indices = torch.full((tokens, top_k), experts // 2) if skew else random_choices(tokens, experts, top_k)
    order = sort_by_expert(indices, experts, tile)
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weights = torch.rand(tokens, top_k).requires_grad_()
    rows = permute(hidden, order)
    real = order.source >= 0
    assert torch.equal(rows[real], hidden[order.source[real] // top_k])
    assert not rows[~real].any()

    scale = torch.randn(rows.shape[0], 1).to(dtype)  # rows of one token differ
    leaf = (rows * scale).detach().masked_fill(~real.unsqueeze(-1), float("nan")).requires_grad_()
    out = combine(leaf, weights, order)
    leaf64, weights64, hidden64 = (x.detach().double().requires_grad_() for x in (leaf, weights, hidden))
    right = (leaf64[order.position].unflatten(0, (tokens, top_k)) * weights64.unsqueeze(-1)).sum(1)
    pull = torch.randn(tokens, width).to(dtype)
    out.backward(pull)
    right.backward(pull.double())
    assert out.dtype == leaf.dtype == dtype and weights.grad is not None and leaf.grad is not None
    for ours, wanted in ((out, right), (leaf.grad, leaf64.grad), (weights.grad, weights64.grad)):
        assert relative_error(ours, wanted) <= TOLERANCE[ours.dtype]

    pull = torch.randn(rows.shape).to(dtype)
    rows.backward(pull)
    hidden64[order.source[real] // top_k].backward(pull[real].double())
    assert relative_error(hidden.grad, hidden64.grad) <= TOLERANCE[dtype]


@pytest.mark.parametrize("tile", [1, 4])
def test_gradients_equal_finite_differences(tile: int, implementation: str) -> None:
    order = sort_by_expert(random_choices(7, 5, 3), 5, tile)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(order.source.shape[0], 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, order), hidden)
    assert torch.autograd.gradcheck(lambda r, w: combine(r, w, order), (rows, weights))


def test_an_expert_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "cpp")
    with pytest.raises(RuntimeError, match=r"expert 4 is not in \[0, 4\)"):
        sort_by_expert(torch.tensor([[0], [4]]), 4)


def test_combine_of_bf16_rows_sums_in_fp32(implementation: str) -> None:
    order = sort_by_expert(random_choices(11, 4, 3), 4)
    rows, weights = torch.randn(33, 8).bfloat16(), torch.rand(11, 3)
    out = combine(rows, weights, order)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, combine(rows.float(), weights, order).bfloat16())


@pytest.mark.parametrize("tile", [1, 4])
def test_opcheck(tile: int, implementation: str) -> None:
    indices = random_choices(7, 5, 3)
    order = sort_by_expert(indices, 5, tile)
    hidden, weights = torch.randn(7, 6, requires_grad=True), torch.rand(7, 3, requires_grad=True)
    rows = torch.randn(order.source.shape[0], 6, requires_grad=True)
    torch.library.opcheck(_sort_by_expert, (indices, 5, tile))
    torch.library.opcheck(_permute, (hidden, order.source, order.position, 3))
    torch.library.opcheck(_combine, (rows, weights, order.source, order.position))


def test_compiles_into_one_graph(implementation: str) -> None:
    def loss(hidden: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order = sort_by_expert(indices, 5, 4)
        return combine(permute(hidden, order).sin(), weights, order).square().sum()

    indices = random_choices(7, 5, 3)
    eager = [torch.randn(7, 6, requires_grad=True), torch.rand(7, 3, requires_grad=True)]
    compiled = [x.detach().clone().requires_grad_() for x in eager]
    loss(*eager, indices).backward()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(*compiled, indices).backward()
    for ours, right in zip(compiled, eager, strict=True):
        assert torch.equal(ours.grad, right.grad)


def test_an_inverse_order_brings_rows_back() -> None:
    order = sort_by_expert(torch.tensor([[2], [0], [1], [0]]), 3)
    rows = torch.randn(4, 3)
    inverse = ExpertOrder(order.position, order.source, order.counts, top_k=1)
    assert torch.equal(permute(permute(rows, order), inverse), rows)
