"""Clipped policy loss: values and gradients per case against closed forms, at the sides of every bound."""

from __future__ import annotations

import math

import pytest
import torch

from areal.algorithms.policy_loss import ppo_loss

EPS, EPS_HIGH, C = 0.2, 0.28, 3.0


def closed_form(ratio: float, advantage: float, eps_high: float, c_clip: float | None) -> tuple[float, float]:
    """(loss, d loss / d l): the gradient is -A r where the unclipped branch is active, else 0."""
    bounded = min(max(ratio, 1 - EPS), 1 + eps_high)
    loss, gradient = -advantage * ratio, -advantage * ratio
    if -advantage * bounded > loss:
        loss, gradient = -advantage * bounded, 0.0
    if c_clip is not None and advantage < 0 and loss > c_clip * abs(advantage):
        loss, gradient = c_clip * abs(advantage), 0.0
    return loss, gradient


@pytest.mark.parametrize("advantage", [2.0, -0.5, 0.0])
@pytest.mark.parametrize("ratio", [0.01, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 2.9, 3.1, 50.0])
@pytest.mark.parametrize("eps_high", [None, EPS_HIGH])
@pytest.mark.parametrize("c_clip", [None, C])
def test_value_and_gradient_of_one_token(
    advantage: float, ratio: float, eps_high: float | None, c_clip: float | None
) -> None:
    proximal = torch.tensor([-1.5], dtype=torch.float64)
    logprobs = (proximal + math.log(ratio)).requires_grad_()
    result = ppo_loss(
        logprobs,
        proximal,
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([True]),
        eps_clip=EPS,
        eps_clip_higher=eps_high,
        c_clip=c_clip,
    )
    loss, gradient = closed_form(ratio, advantage, EPS if eps_high is None else eps_high, c_clip)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    (got,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert got.item() == pytest.approx(gradient, abs=1e-12)
    outside = ratio > 1 + (EPS if eps_high is None else eps_high) if advantage > 0 else ratio < 1 - EPS
    assert result.clipped.item() == (outside and advantage != 0)
    assert result.dual_clipped.item() == (c_clip is not None and advantage < 0 and ratio > C)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-0.3, -2.0, -5.0], requires_grad=True)
    advantages = torch.tensor([1.5, -2.0, 0.5])
    mask = torch.ones(3, dtype=torch.bool)
    ppo_loss(logprobs, logprobs.detach(), advantages, mask, eps_clip=0.2).loss.sum().backward()
    assert torch.equal(logprobs.grad, -advantages)


def test_gradient_does_not_flow_into_the_proximal_logprobs() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    result = ppo_loss(logprobs, logprobs, torch.ones(1), torch.ones(1, dtype=torch.bool), eps_clip=0.2)
    result.loss.sum().backward()
    assert logprobs.grad.item() == -1.0


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_junk_under_the_mask_changes_neither_value_nor_gradient(junk: float) -> None:
    mask = torch.tensor([True, False, True])
    values = [torch.tensor([-1.0, junk, -2.0]), torch.tensor([-1.1, junk, -2.2]), torch.tensor([1.0, junk, -1.0])]
    logprobs = values[0].requires_grad_()
    result = ppo_loss(logprobs, values[1], values[2], mask, eps_clip=0.2)
    result.loss.sum().backward()
    clean = ppo_loss(*(v.detach()[mask] for v in values), torch.ones(2, dtype=torch.bool), eps_clip=0.2)
    assert torch.equal(result.loss.detach()[mask], clean.loss)
    assert result.loss[1] == 0 and logprobs.grad[1] == 0 and logprobs.grad.isfinite().all()


def test_a_ratio_that_would_overflow_leaves_clipped_gradients_finite() -> None:
    logprobs = torch.tensor([-0.1, -0.1], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0])
    mask = torch.ones(2, dtype=torch.bool)
    result = ppo_loss(logprobs, torch.tensor([-500.0, -500.0]), advantages, mask, eps_clip=0.2, c_clip=3.0)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([-1.2, 3.0])
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_half_precision_logprobs_are_subtracted_in_fp32() -> None:
    logprobs, proximal = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.001])
    result = ppo_loss(logprobs, proximal, torch.ones(1), torch.ones(1, dtype=torch.bool), eps_clip=0.2)
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(-math.exp(0.001), rel=1e-6)
