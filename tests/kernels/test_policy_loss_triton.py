"""The Triton kernel of the policy loss in Triton's interpreter; tolerances as in test_policy_loss."""

from __future__ import annotations

import math

import pytest
import torch
from cases import pairwise
from policy_loss_cases import DTYPES, MASKS, OPTIONS, assert_equals_truth, sums_of

from archon_kernels.policy_loss import masked_policy_loss

pytestmark = pytest.mark.slow  # the interpreter takes milliseconds per program

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "triton")


CASES = pairwise(
    tokens=(0, 1, 7, 129, 1500),  # of which the last takes two programs
    dtype=tuple(DTYPES),
    mask=MASKS,
    option=tuple(OPTIONS),
    weighted=(False, True),
)


@pytest.mark.parametrize(("tokens", "dtype", "mask", "option", "weighted"), [case.values() for case in CASES])
def test_loss_gradient_and_sums_equal_closed_forms(
    tokens: int, dtype: torch.dtype, mask: str, option: str, weighted: bool
) -> None:
    assert_equals_truth(tokens, dtype, mask, option, weighted=weighted, sums_rtol=1e-6)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 0.49, 0.51, 3.0])
def test_k3_of_small_log_ratios_keeps_its_digits(size: float) -> None:
    proximal = torch.tensor([0.0])
    for log_ratio in (size, -size):
        logprobs = torch.tensor([log_ratio])
        result = masked_policy_loss(logprobs, proximal, torch.ones(1), torch.ones(1, dtype=torch.bool), eps_clip=0.2)
        exact = logprobs.double()
        assert result.kl.item() == pytest.approx((torch.expm1(exact) - exact).item(), rel=2e-6)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_shows_and_overflow_does_not() -> None:
    logprobs, proximal = torch.tensor([math.nan, -0.1, -0.1]), torch.tensor([-1.0, -500.0, -math.inf])
    logprobs.requires_grad_()
    mask, advantages = torch.tensor([True, True, True]), torch.tensor([1.0, 1.0, -1.0])
    result = masked_policy_loss(logprobs, proximal, advantages, mask, eps_clip=0.2, c_clip=3.0)
    assert result.loss_T.isnan().tolist() == [True, False, False] and result.ratio.isnan() and result.kl.isnan()
    assert result.loss_T[1:].tolist() == pytest.approx([-1.2, 3.0])
    mask[0] = False
    result = masked_policy_loss(logprobs, proximal, advantages, mask, eps_clip=0.2, c_clip=3.0)
    result.loss_T.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    assert sums_of(result).tolist() == pytest.approx([2 * math.exp(80), 2 * math.exp(80), 1, 1, 2], rel=1e-6)
