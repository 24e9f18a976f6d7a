"""Off-policy correction: importance weights exp(p - b), and the rejection sampling that shapes them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from archon_kernels.policy_loss import MAX_LOG_RATIO, log_ratios
from areal.algorithms.segments import segment_max, segment_sum

RejectionLevel = Literal["token", "sequence"]
RejectionAction = Literal["mask", "clamp"]
RejectionMetric = Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"]
RejectionAgg = Literal["sum", "mean", "max"]

DEFAULT_UPPER = 5.0
DEFAULT_UPPER_BINARY_KL = 0.1
PROBABILITY_FLOOR = 1e-6


@dataclass(frozen=True)
class RejectionSampling:
    """Which importance weights are kept. TIS: token, clamp, ratio, upper 2. MIS: mask, ratio. IcePop: token, mask,
    ratio in [0.5, 5] (arXiv 2510.18855). KPop: token, mask, binary_kl, upper 0.1.

    Attributes:
        level: judge each token, or each sequence as a whole.
        action: ``mask`` drops what is out of bounds; ``clamp`` moves its weights to the bounds (metric ratio only).
        metric: what is bounded; see ``token_metric``.
        agg: how a sequence's tokens are put together: ratios in log space (mean is geometric), KLs arithmetically.
        lower: smallest value in bounds; None for no bound.
        upper: largest value in bounds; None is 5, and 0.1 for ``binary_kl``.
    """

    level: RejectionLevel = "token"
    action: RejectionAction = "mask"
    metric: RejectionMetric = "ratio"
    agg: RejectionAgg = "mean"
    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        options = {"level": RejectionLevel, "action": RejectionAction, "metric": RejectionMetric, "agg": RejectionAgg}
        for name, choices in options.items():
            if getattr(self, name) not in get_args(choices):
                raise ValueError(
                    f"rejection_sampling.{name} is {getattr(self, name)!r}; it is one of {', '.join(get_args(choices))}"
                )
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(
                f"rejection_sampling.action: clamp bounds the ratio itself and cannot use metric {self.metric}: "
                "set action: mask or metric: ratio"
            )
        if self.upper is None:
            default = DEFAULT_UPPER_BINARY_KL if self.metric == "binary_kl" else DEFAULT_UPPER
            object.__setattr__(self, "upper", default)
        assert self.upper is not None
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(f"rejection_sampling.lower {self.lower} is above upper {self.upper}: nothing is kept")
        if self.metric == "binary_kl" and self.upper > 1.0:
            warnings.warn(
                f"rejection_sampling.upper is {self.upper}: with binary_kl almost nothing is masked above 1; "
                f"the usual value is {DEFAULT_UPPER_BINARY_KL}",
                stacklevel=2,
            )


@dataclass(frozen=True)
class Correction:
    """All ``[T]``.

    Attributes:
        weights: what the token loss is multiplied by; 0 outside the mask and where ``filtered``.
        log_weights: p - b before shaping; 0 outside the mask and where it is not finite.
        filtered: trained tokens that were dropped, the non-finite ones among them.
        clamped: trained tokens whose weight was moved to a bound.
        nonfinite: trained tokens whose p - b is not finite.
    """

    weights: Tensor
    log_weights: Tensor
    filtered: Tensor
    clamped: Tensor
    nonfinite: Tensor


@torch.no_grad()
def off_policy_correction(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    rejection: RejectionSampling | None = None,
) -> Correction:
    """Weights exp(p - b) of the trained tokens, shaped by ``rejection``.

    Args:
        proximal_logprobs, behaviour_logprobs: ``[T]`` p and b.
        mask: ``[T]`` bool; other entries are never read.
        sequence_ids: ``[T]`` sequence of each token; whole sequences are in view.
    """
    difference = log_ratios(proximal_logprobs, behaviour_logprobs, mask)
    nonfinite = mask & ~difference.isfinite()
    valid = mask & ~nonfinite
    log_weights = torch.where(valid, difference, 0.0)
    raw = torch.where(valid, log_weights.clamp(max=MAX_LOG_RATIO).exp(), 0.0)
    nothing = torch.zeros_like(mask)
    if rejection is None:
        return Correction(raw, log_weights, filtered=nonfinite, clamped=nothing, nonfinite=nonfinite)
    out = valid & ~_in_bounds(proximal_logprobs, behaviour_logprobs, log_weights, valid, sequence_ids, rejection)
    if rejection.action == "mask":
        weights = torch.where(out, 0.0, raw)
        return Correction(weights, log_weights, filtered=nonfinite | out, clamped=nothing, nonfinite=nonfinite)
    weights = torch.where(out, raw.clamp(rejection.lower, rejection.upper), raw)
    return Correction(weights, log_weights, filtered=nonfinite, clamped=weights != raw, nonfinite=nonfinite)


def token_metric(proximal_logprobs: Tensor, behaviour_logprobs: Tensor, metric: RejectionMetric) -> Tensor:
    """The bounded quantity per token ``[M]``, for d = b - p; a ratio comes as its logarithm.

    ``ratio`` p - b; ``kl_k1`` d; ``kl_k2`` d²/2; ``kl_k3`` exp(-d) - 1 + d; ``binary_kl`` the larger of B(P‖Q) and
    B(Q‖P), the KLs between sampling the token and not, with P = e^p and Q = e^b clamped to [1e-6, 1 - 1e-6].
    """
    if metric == "binary_kl":
        return _binary_kl(proximal_logprobs, behaviour_logprobs)
    d = behaviour_logprobs - proximal_logprobs
    if metric == "ratio":
        return -d
    if metric == "kl_k1":
        return d
    if metric == "kl_k2":
        return d.square() / 2
    return torch.expm1(-d) + d


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    # fp64: in fp32, 1 - P has lost its digits long before P reaches 1 - 1e-6.
    prob_p, prob_q = (x.double().exp().clamp(PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR) for x in (p, q))
    hit, miss = prob_p.log() - prob_q.log(), torch.log1p(-prob_p) - torch.log1p(-prob_q)
    forward = prob_p * hit + (1 - prob_p) * miss
    backward = -prob_q * hit - (1 - prob_q) * miss
    return torch.maximum(forward, backward)


def _in_bounds(
    proximal: Tensor, behaviour: Tensor, log_weights: Tensor, valid: Tensor, ids: Tensor, rejection: RejectionSampling
) -> Tensor:
    """``[T]`` bool, meaningful on valid tokens. Sequences are judged by their valid tokens, with sums in fp64."""
    index = valid.nonzero().squeeze(-1)
    dtype = log_weights.dtype
    values = token_metric(proximal[index].to(dtype), behaviour[index].to(dtype), rejection.metric).double()
    owners = ids[index]
    if rejection.level == "sequence":
        count = int(ids[-1]) + 1 if len(ids) else 0
        if rejection.agg == "max":
            values = segment_max(values, owners, count)[owners]
        else:
            total = segment_sum(values, owners, count)
            if rejection.agg == "mean":
                total = total / segment_sum(torch.ones_like(values), owners, count).clamp(min=1)
            values = total[owners]
    if rejection.metric == "ratio":
        values = values.exp()
    assert rejection.upper is not None
    lower = -torch.inf if rejection.lower is None else rejection.lower
    inside = torch.ones_like(valid)
    inside[index] = (values >= lower) & (values <= rejection.upper)
    return inside
