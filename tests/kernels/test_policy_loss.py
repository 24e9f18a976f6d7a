"""Clipped policy loss: values, gradients and sums against closed forms, at the sides of every bound.

Tolerances: losses and gradients 1e-6 (1e-12 for fp64; the gradient of bf16 log-probs, rounded to it, 4e-3 and of fp16
ones 5e-4 relative), sums of ratios and KL 1e-6, counts exact. There is no C++: the reference is one pass already.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import noted
from moe_cases import TOKENS
from policy_loss_cases import DTYPES, MASKS, OPTIONS, assert_equals_truth, columns, sums_of, true_loss
from torch import Tensor

from archon_kernels.policy_loss import _policy_loss, masked_policy_loss

EPS, EPS_HIGH, C = 0.2, 0.28, 3.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_loss_gradient_and_sums_equal_closed_forms(mask: str, dtype: torch.dtype) -> None:
    for tokens, option, weighted in itertools.product(TOKENS, OPTIONS, (False, True)):
        with noted(tokens=tokens, option=option, weighted=weighted):
            assert_equals_truth(tokens, dtype, mask, option, weighted=weighted, sums_rtol=1e-6)


@pytest.mark.parametrize("eps_high", [None, EPS_HIGH])
@pytest.mark.parametrize("c_clip", [None, C])
def test_value_and_gradient_of_one_token_on_both_sides_of_every_bound(
    eps_high: float | None, c_clip: float | None
) -> None:
    ratios = (0.01, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 2.9, 3.1, 50.0)
    for advantage, ratio in itertools.product((2.0, -0.5, 0.0), ratios):
        with noted(advantage=advantage, ratio=ratio):
            check_one_token(advantage, ratio, eps_high, c_clip)


def check_one_token(advantage: float, ratio: float, eps_high: float | None, c_clip: float | None) -> None:
    options = {"eps_clip": EPS, "eps_clip_higher": eps_high, "c_clip": c_clip}
    proximal = torch.tensor([-1.5], dtype=torch.float64)
    logprobs = (proximal + math.log(ratio)).requires_grad_()
    advantages, mask = torch.tensor([advantage], dtype=torch.float64), torch.tensor([True])
    result = masked_policy_loss(logprobs, proximal, advantages, mask, **options)
    loss, gradient, _ = true_loss(logprobs.detach(), proximal, advantages, mask, None, **options)
    assert result.loss_T.item() == pytest.approx(loss[0], abs=1e-12)
    (got,) = torch.autograd.grad(result.loss_T.sum(), logprobs)
    assert got.item() == pytest.approx(gradient[0], abs=1e-12)
    outside = ratio > 1 + (EPS if eps_high is None else eps_high) if advantage > 0 else ratio < 1 - EPS
    assert result.clipped.item() == (outside and advantage != 0)
    assert result.dual_clipped.item() == (c_clip is not None and advantage < 0 and ratio > C)


@pytest.mark.parametrize("option", OPTIONS)
def test_gradient_equals_finite_differences(option: str) -> None:
    logprobs, *rest, mask, weights = columns(60, torch.float64, "random")
    logprobs = torch.where(mask, logprobs, 0.0).requires_grad_()  # differences of junk are junk

    def loss(x: Tensor) -> Tensor:
        return masked_policy_loss(x, *rest, mask, weights_T=weights, **OPTIONS[option]).loss_T

    assert torch.autograd.gradcheck(loss, logprobs)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-0.3, -2.0, -5.0], requires_grad=True)
    advantages = torch.tensor([1.5, -2.0, 0.5])
    mask = torch.ones(3, dtype=torch.bool)
    masked_policy_loss(logprobs, logprobs.detach(), advantages, mask, eps_clip=0.2).loss_T.sum().backward()
    assert torch.equal(logprobs.grad, -advantages)


def test_gradient_flows_into_the_logprobs_only() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    advantages, weights = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    mask = torch.ones(1, dtype=torch.bool)
    result = masked_policy_loss(logprobs, logprobs, advantages, mask, eps_clip=0.2, weights_T=weights)
    result.loss_T.sum().backward()
    assert logprobs.grad.item() == -1.0 and advantages.grad is None and weights.grad is None


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_junk_under_the_mask_changes_nothing(junk: float) -> None:
    results = []
    for hidden in (0.0, junk):
        logprobs, *rest, weights = columns(129, torch.float32, "random", junk=hidden)
        logprobs.requires_grad_()
        result = masked_policy_loss(logprobs, *rest, weights_T=weights, **OPTIONS["dual"])
        result.loss_T.sum().backward()
        results.append((result.loss_T.detach(), logprobs.grad, sums_of(result)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert results[1][0].isfinite().all()


def test_what_is_not_a_number_under_no_mask_shows() -> None:
    logprobs, proximal = torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0])
    result = masked_policy_loss(logprobs, proximal, torch.ones(2), torch.ones(2, dtype=torch.bool), eps_clip=0.2)
    assert result.loss_T.isnan().tolist() == [True, False] and result.ratio.isnan() and result.kl.isnan()


def test_a_ratio_that_would_overflow_leaves_gradients_and_sums_finite() -> None:
    logprobs = torch.tensor([-0.1, -0.1], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0])
    mask = torch.ones(2, dtype=torch.bool)
    proximal = torch.tensor([-500.0, -math.inf])
    result = masked_policy_loss(logprobs, proximal, advantages, mask, eps_clip=0.2, c_clip=3.0)
    result.loss_T.sum().backward()
    assert result.loss_T.tolist() == pytest.approx([-1.2, 3.0])
    assert logprobs.grad.tolist() == [0.0, 0.0]
    assert sums_of(result).tolist() == pytest.approx([2 * math.exp(80), 2 * math.exp(80), 1, 1, 2])


def test_half_precision_logprobs_are_subtracted_in_fp32() -> None:
    logprobs, proximal = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.001])
    result = masked_policy_loss(logprobs, proximal, torch.ones(1), torch.ones(1, dtype=torch.bool), eps_clip=0.2)
    assert result.loss_T.dtype == torch.float32
    assert result.loss_T.item() == pytest.approx(-math.exp(0.001), rel=1e-6)


def test_opcheck() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logprobs, *rest, weights = columns(7, dtype, "all")
        logprobs.requires_grad_()
        for extra in ((None, 0.8, 1.2, None), (weights, 0.8, 1.28, 3.0)):
            torch.library.opcheck(_policy_loss, (logprobs, *rest, *extra))


def test_compiles_without_a_graph_break() -> None:
    def loss(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        result = masked_policy_loss(x, *rest[:3], weights_T=rest[3], **OPTIONS["dual"])
        return result.loss_T.sum(), sums_of(result)

    results = []
    for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        logprobs, *rest = columns(129, torch.float32, "random")
        logprobs.requires_grad_()
        value, sums = run(logprobs, *rest)
        value.backward()
        results.append((value, sums, logprobs.grad))
    for plain, compiled in zip(*results, strict=True):
        assert torch.equal(plain, compiled)
