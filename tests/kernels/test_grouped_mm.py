"""Matrix products by expert, reference and C++, against one product per expert in fp64.

Tolerances of the norm of a result or gradient, by its dtype: fp32 2e-6, bf16 1e-2, fp16 2e-3, fp64 1e-14.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import IMPLEMENTATIONS, noted, use
from moe_cases import PRODUCTS, SIZES, TOKENS, assert_multiplies, choices, counts_of
from torch import Tensor

from archon_kernels.grouped_mm import _grouped_linear, _grouped_swiglu, grouped_linear, grouped_swiglu

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-14}
WIDTHS = {"aligned": (8, 16), "prime": (7, 11), "half_aligned": (8, 3)}
GROUPS = {
    "uneven": [3, 0, 5, 1],
    "nothing": [0, 0, 0, 0],
    "all_to_the_first": [17, 0, 0, 0],
    "all_to_the_last": [0, 0, 0, 13],
    "one_expert": [129],
    "one_each": [1, 1, 1, 1],
    "many_experts": counts_of(300, 128).tolist(),
    "skew": [1000, 3, 0, 1],
}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use(request.param, monkeypatch)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("width", "inner"), WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("op", PRODUCTS)
def test_products_and_gradients_equal_one_product_per_expert(op: str, width: int, inner: int) -> None:
    for (groups, counts), dtype, beyond in itertools.product(GROUPS.items(), TOLERANCE, (0, 5)):
        with noted(groups=groups, dtype=dtype, beyond=beyond):
            assert_multiplies(op, counts, width, inner, beyond, dtype, TOLERANCE[dtype])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
@pytest.mark.parametrize("op", PRODUCTS)
def test_products_of_routed_tokens_equal_one_product_per_expert(op: str, experts: int, top_k: int) -> None:
    for tokens, skewed, dtype in itertools.product(TOKENS, (False, True), (torch.float32, torch.bfloat16)):
        counts = torch.bincount(choices(tokens, experts, top_k, skewed).flatten(), minlength=experts).tolist()
        with noted(tokens=tokens, skewed=skewed, dtype=dtype):
            assert_multiplies(op, counts, 8, 5, 3, dtype, TOLERANCE[dtype])


def test_rows_beyond_the_counts_may_hold_anything(implementation: None) -> None:
    counts = torch.tensor([2, 1])
    for op, _, halves in PRODUCTS.values():
        rows, weight = torch.randn(5, 8), torch.randn(2, 8 * halves, 8, requires_grad=True)
        rows[3:] = float("nan")
        rows.requires_grad_()
        pull = torch.randn(5, 8)
        pull[3:] = float("nan")
        out = op(rows, weight, counts)
        out.backward(pull)
        assert rows.grad is not None and weight.grad is not None
        assert not out[3:].any() and not rows.grad[3:].any() and bool(weight.grad.isfinite().all())


@pytest.mark.parametrize("op", PRODUCTS)
def test_gradients_equal_finite_differences(op: str, implementation: None) -> None:
    function, _, halves = PRODUCTS[op]
    rows = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4 * halves, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, w: function(r, w, torch.tensor([2, 0, 4])), (rows, weight))


def test_silu_holds_over_the_whole_range(implementation: None) -> None:
    """With weight 1, the product is the input; the largest error is a few units in the last place."""
    gate = torch.cat([torch.linspace(-100, 100, 20001), torch.tensor([-1e30, -1e4, 1e4, 1e30])]).requires_grad_()
    rows = torch.stack([gate, torch.ones_like(gate)], dim=-1)
    out = grouped_swiglu(rows, torch.eye(2).unsqueeze(0), torch.tensor([gate.shape[0]])).squeeze(-1)
    out.sum().backward()
    right = gate.detach().double().requires_grad_()
    expected = torch.nn.functional.silu(right)
    expected.sum().backward()
    assert gate.grad is not None and right.grad is not None
    inside = gate.abs() < 80
    torch.testing.assert_close(out[inside].double(), expected[inside], rtol=6e-7, atol=0)
    torch.testing.assert_close(out.double(), expected, rtol=6e-7, atol=1e-7)
    torch.testing.assert_close(gate.grad.double(), right.grad, rtol=1e-6, atol=2e-7)


def test_a_frozen_weight_gets_no_gradient_and_rows_do(implementation: None) -> None:
    counts = torch.tensor([3, 4])
    for op, _, halves in PRODUCTS.values():
        rows, weight = torch.randn(7, 8, requires_grad=True), torch.randn(2, 8 * halves, 8)
        op(rows, weight, counts).sum().backward()
        assert rows.grad is not None and weight.grad is None
        frozen, trained = rows.detach(), weight.clone().requires_grad_()
        op(frozen, trained, counts).sum().backward()
        assert trained.grad is not None and frozen.grad is None


def test_strided_operands(implementation: None) -> None:
    rows, weight = torch.randn(8, 7).t(), torch.randn(2, 8, 16).transpose(1, 2)
    counts = torch.tensor([3, 4])
    for op, _, _ in PRODUCTS.values():
        assert torch.equal(op(rows, weight, counts), op(rows.contiguous(), weight.contiguous(), counts))


def test_autocast_computes_in_its_dtype(implementation: None) -> None:
    rows, counts = torch.randn(7, 8, requires_grad=True), torch.tensor([3, 4])
    for op, _, halves in PRODUCTS.values():
        weight = torch.randn(2, 8 * halves, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = op(rows, weight, counts)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, op(rows.bfloat16(), weight.bfloat16(), counts))
        out.float().sum().backward()
        assert rows.grad is not None and weight.grad is not None
        assert rows.grad.dtype == weight.grad.dtype == torch.float32


def test_opcheck(implementation: None) -> None:
    counts = torch.tensor([3, 0, 4])
    rows = torch.randn(9, 6, requires_grad=True)
    torch.library.opcheck(_grouped_linear, (rows, torch.randn(3, 5, 6, requires_grad=True), counts))
    torch.library.opcheck(_grouped_swiglu, (rows, torch.randn(3, 10, 6, requires_grad=True), counts))


def test_compiles_into_one_graph(implementation: None) -> None:
    counts = torch.tensor([3, 0, 4])

    def loss(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return grouped_linear(grouped_swiglu(rows, gate_up, counts), down, counts).float().square().sum()

    eager = [torch.randn(shape, requires_grad=True) for shape in ((7, 8), (3, 16, 8), (3, 8, 8))]
    compiled = [x.detach().clone().requires_grad_() for x in eager]
    loss(*eager).backward()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(*compiled).backward()
    for ours, right in zip(compiled, eager, strict=True):
        assert torch.equal(ours.grad, right.grad)


def test_counts_that_pass_the_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use("cpp", monkeypatch)
    with pytest.raises(RuntimeError, match="counts pass the 5 rows at expert 1"):
        grouped_linear(torch.randn(5, 8), torch.randn(2, 8, 8), torch.tensor([3, 3]))
