"""RMS norm and rotary positions against fp64 autograd, by reference and C++."""

from __future__ import annotations

import pytest
import torch
from cases import IMPLEMENTATIONS, threads, use
from torch import Tensor
from torch.nn import functional as F

from archon.models.config import RopeConfig
from archon.models.rope import cos_sin
from archon_kernels.norm import _rms_norm, _rms_norm_backward, rms_norm
from archon_kernels.rope import _rotate, rotate

EPS = 1e-6
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-14}
"""Of the norm of a result; bf16 rounds to 2^-9, fp16 to 2^-12, and weight gradients once more."""


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use(request.param, monkeypatch)


def assert_near(ours: Tensor, truth: Tensor) -> None:
    assert ours.shape == truth.shape
    assert (ours.double() - truth).norm() <= TOLERANCES[ours.dtype] * truth.norm()


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 3), (7, 64), (129, 512), (1000, 101)])
def test_norm_equals_fp64(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, pull = (
        draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, width), (width,), (rows, width)])
    )
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    (out * pull.detach()).sum().backward()
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    truth = F.rms_norm(x64, (width,), weight64, EPS)
    (truth * pull.detach().double()).sum().backward()
    for ours, right in ((out, truth), (x.grad, x64.grad), (weight.grad, weight64.grad)):
        assert ours is not None and right is not None
        if rows:
            assert_near(ours.detach(), right.detach())
        else:
            assert ours.shape == right.shape and not ours.any()


def test_norm_of_heads_and_of_strided_rows() -> None:
    x, weight = draw(5, 6, 16, dtype=torch.float32), draw(16, dtype=torch.float32)
    assert_near(
        rms_norm(x.transpose(0, 1), weight, EPS), F.rms_norm(x.double().transpose(0, 1), (16,), weight.double(), EPS)
    )


def test_norm_of_large_and_of_tiny_rows_is_finite() -> None:
    x = torch.tensor([[3e18, -3e18], [1e-30, 1e-30], [0.0, 0.0]], requires_grad=True)
    out = rms_norm(x, torch.ones(2), EPS)
    out.sum().backward()
    assert x.grad is not None and out.isfinite().all() and x.grad.isfinite().all()


def test_norm_gradient_equals_finite_differences() -> None:
    inputs = draw(3, 5, dtype=torch.float64), draw(5, dtype=torch.float64, seed=1)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), inputs)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 2, 8), (1, 1, 2), (7, 3, 64), (129, 8, 16), (1000, 2, 6)])
def test_rotation_equals_complex_numbers(tokens: int, heads: int, size: int, dtype: torch.dtype) -> None:
    x, pull = draw(tokens, heads, size, dtype=dtype), draw(tokens, heads, size, dtype=dtype, seed=1)
    positions = torch.arange(tokens) * 3
    cos, sin = cos_sin(RopeConfig(10_000.0), size, positions)
    out = rotate(x, cos, sin)
    (out * pull.detach()).sum().backward()
    turn = torch.complex(cos[..., : size // 2].double(), sin[..., size // 2 :].double())
    x64 = x.detach().double().requires_grad_()
    turned = torch.complex(x64[..., : size // 2], x64[..., size // 2 :]) * turn
    truth = torch.cat([turned.real, turned.imag], -1)
    (truth * pull.detach().double()).sum().backward()
    assert out.dtype == dtype and x.grad is not None and x64.grad is not None
    assert_near(out.detach(), truth.detach())
    assert_near(x.grad, x64.grad)


def test_rotation_keeps_lengths_and_is_undone_by_its_backward() -> None:
    x = draw(31, 4, 32, dtype=torch.float64)
    cos, sin = (table.double() for table in cos_sin(RopeConfig(10_000.0), 32, torch.arange(31)))
    out = rotate(x, cos, sin)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    out.backward(out.detach())
    torch.testing.assert_close(x.grad, x.detach(), rtol=1e-6, atol=1e-6)


def test_rotation_reads_strided_heads() -> None:
    x = draw(4, 9, 16, dtype=torch.float32)
    cos, sin = cos_sin(RopeConfig(10_000.0), 16, torch.arange(9))
    strided = x.transpose(0, 1)
    torch.testing.assert_close(rotate(strided, cos, sin), rotate(strided.contiguous(), cos, sin), rtol=0, atol=0)


def test_tables_for_other_tokens_are_refused() -> None:
    cos, sin = cos_sin(RopeConfig(10_000.0), 16, torch.arange(5))
    with pytest.raises(RuntimeError, match="one row for each token|must match the size"):
        rotate(draw(9, 2, 16, dtype=torch.float32), cos, sin)


def test_opcheck_and_one_graph() -> None:
    x, weight = draw(5, 16, dtype=torch.float32), draw(16, dtype=torch.float32, seed=1)
    torch.library.opcheck(_rms_norm, (x, weight, EPS))
    torch.library.opcheck(_rms_norm_backward, (x.detach(), x.detach(), weight.detach(), torch.ones(5)))
    heads = draw(5, 2, 16, dtype=torch.float32)
    cos, sin = cos_sin(RopeConfig(10_000.0), 16, torch.arange(5))
    torch.library.opcheck(_rotate, (heads, cos, sin, False))

    def both(x: Tensor, heads: Tensor) -> Tensor:
        return rms_norm(x, weight, EPS).sum() + rotate(rms_norm(heads, weight, EPS), cos, sin).square().mean()

    expected = torch.autograd.grad(both(x, heads), (x, heads, weight))
    found = torch.autograd.grad(torch.compile(both, backend="aot_eager", fullgraph=True)(x, heads), (x, heads, weight))
    torch.testing.assert_close(found, expected)


def test_a_weight_of_another_width_is_refused() -> None:
    for width in (4, 128):
        with pytest.raises(ValueError, match=rf"a weight of shape \({width},\) cannot scale rows of \(64,\)"):
            rms_norm(torch.randn(4, 64), torch.ones(width), EPS)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_share_the_rows(count: int) -> None:
    x, weight, pull = (draw(*shape, dtype=torch.float32, seed=3) for shape in [(1000, 101), (101,), (1000, 101)])
    with threads(count):
        out = rms_norm(x, weight, EPS)
        grads = torch.autograd.grad(out, (x, weight), pull)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    truth = F.rms_norm(x64, (101,), weight64, EPS)
    for ours, right in zip(
        (out, *grads), (truth, *torch.autograd.grad(truth, (x64, weight64), pull.double())), strict=True
    ):
        assert_near(ours, right)
