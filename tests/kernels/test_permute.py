"""Sorting rows by expert and combining them, reference and C++, against plain formulas in fp64.

Tolerances of the norm of a result or gradient, by its dtype: fp32 1e-6, bf16 4e-3, fp16 5e-4, fp64 1e-14; permute
itself and the order are exact.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import IMPLEMENTATIONS, noted, use
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import SIZES, TOKENS, assert_moves_and_sums, assert_sorts, choices, random_choices
from torch import Tensor

from archon_kernels.permute import ExpertOrder, _combine, _permute, _sort_by_expert, combine, permute, sort_by_expert

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float64: 1e-14}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use(request.param, monkeypatch)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_sort_is_stable_and_inverts(experts: int, top_k: int) -> None:
    for tokens, skewed, tile in itertools.product(TOKENS, (False, True), (1, 16)):
        with noted(tokens=tokens, skewed=skewed, tile=tile):
            assert_sorts(choices(tokens, experts, top_k, skewed), experts, tile)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_permute_and_combine_equal_plain_formulas(experts: int, top_k: int) -> None:
    for tokens, skewed, dtype, tile in itertools.product(TOKENS, (False, True), TOLERANCE, (1, 16)):
        if tokens == 1000 and dtype in (torch.float16, torch.float64):
            continue  # these are no part of what must be proven, and take time
        with noted(tokens=tokens, skewed=skewed, dtype=dtype, tile=tile):
            assert_moves_and_sums(choices(tokens, experts, top_k, skewed), experts, tile, dtype, TOLERANCE, width=24)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 5), st.data())
def test_the_static_number_of_rows_suffices_for_any_choices(
    tokens: int, experts: int, tile: int, data: st.DataObject
) -> None:
    drawn = data.draw(st.lists(st.integers(0, experts - 1), min_size=tokens, max_size=tokens))
    assert_sorts(torch.tensor(drawn, dtype=torch.long).reshape(tokens, 1), experts, tile)


@pytest.mark.parametrize("tile", [1, 4])
def test_gradients_equal_finite_differences(tile: int, implementation: None) -> None:
    order = sort_by_expert(random_choices(7, 5, 3), 5, tile)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(order.source.shape[0], 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, order), hidden)
    assert torch.autograd.gradcheck(lambda r, w: combine(r, w, order), (rows, weights))


def test_choices_of_another_dtype_are_refused(implementation: None) -> None:
    with pytest.raises(ValueError, match=r"expert choices are torch.int32: pass int64"):
        sort_by_expert(torch.zeros(3, 1, dtype=torch.int32), 4)


@pytest.mark.parametrize(("top_k", "tile"), [(0, 1), (1, 0)])
def test_no_choices_and_no_tiles_are_refused(top_k: int, tile: int, implementation: None) -> None:
    with pytest.raises(ValueError, match=f"{top_k} choices per token in tiles of {tile} rows"):
        sort_by_expert(torch.zeros(3, top_k, dtype=torch.long), 4, tile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_results_are_rounded_to_the_nearest_even(dtype: torch.dtype, implementation: None) -> None:
    """Bit for bit as torch rounds: every number of 16 bits, what lies between two, and what overflows."""
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    between = (exact[1:].double() + exact[:-1].double()) / 2
    values = torch.cat([exact, between.float(), between.float().nextafter(torch.tensor(torch.inf)), exact[-1:] * 1.01])
    order = sort_by_expert(torch.zeros(len(values), 1, dtype=torch.long), 1)
    out = combine(torch.ones(len(values), 1, dtype=dtype), values[:, None], order)
    assert torch.equal(out.squeeze(1), values.to(dtype))


def test_an_order_that_does_not_fit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    use("cpp", monkeypatch)
    with pytest.raises(RuntimeError, match=r"expert 4 is not in \[0, 4\)"):
        sort_by_expert(torch.tensor([[0], [4]]), 4)
    order = sort_by_expert(torch.tensor([[1, 0], [0, 1], [1, 0]]), 2)
    rows, weights = torch.randn(6, 4), torch.rand(3, 2)
    with pytest.raises(RuntimeError, match="row 2 comes from pair 5, but there are 2 tokens with 2 choices each"):
        permute(torch.randn(2, 4), order)
    with pytest.raises(RuntimeError, match="6 positions for 2 tokens with 2 choices each"):
        combine(rows, weights[:2], order)
    far = ExpertOrder(order.source, order.position + 3, order.counts, top_k=2)
    for read in (lambda: combine(rows, weights, far), lambda: permute(weights.requires_grad_(), far).sum().backward()):
        with pytest.raises(RuntimeError, match="pair 0 lies in row 6 of 6"):
            read()
    bent = ExpertOrder(order.source + 1, order.position, order.counts, top_k=2)
    with pytest.raises(RuntimeError, match="row 2 comes from pair 6 of 6"):
        combine(rows.requires_grad_(), weights.detach(), bent).sum().backward()
    sorted_rows = (rows.detach(), weights.detach(), order.source, order.position)
    for grad in (torch.ones(2, 4), torch.ones(3, 2)):
        with pytest.raises(RuntimeError, match="for 3 tokens of width 4"):
            torch.ops.archon_cpp.combine_backward(grad, *sorted_rows)


def test_combine_of_bf16_rows_sums_in_fp32(implementation: None) -> None:
    order = sort_by_expert(random_choices(11, 4, 3), 4)
    rows, weights = torch.randn(33, 8).bfloat16(), torch.rand(11, 3)
    out = combine(rows, weights, order)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, combine(rows.float(), weights, order).bfloat16())
    assert torch.equal(out, combine(rows, weights.double(), order))  # weights too are used in fp32


def test_opcheck(implementation: None) -> None:
    indices = random_choices(7, 5, 3)
    order = sort_by_expert(indices, 5, tile=4)
    hidden, weights = torch.randn(7, 6, requires_grad=True), torch.rand(7, 3, requires_grad=True)
    rows = torch.randn(order.source.shape[0], 6, requires_grad=True)
    torch.library.opcheck(_sort_by_expert, (indices, 5, 4))
    torch.library.opcheck(_permute, (hidden, order.source, order.position, 3))
    torch.library.opcheck(_combine, (rows, weights, order.source, order.position))


def test_compiles_into_one_graph(implementation: None) -> None:
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
