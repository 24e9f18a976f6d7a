"""Importance weights and rejection sampling against plain Python, and the keep-bands of the published settings."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from areal.algorithms.rejection import Correction, RejectionSampling, off_policy_correction

LENGTHS = [1, 2, 7, 5, 3]


def metric_of(p: float, b: float, metric: str) -> float:
    d = b - p
    if metric == "ratio":
        return math.exp(-d)
    if metric == "kl_k1":
        return d
    if metric == "kl_k2":
        return d * d / 2
    if metric == "kl_k3":
        return math.exp(-d) - 1 + d
    big_p, big_q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (p, b))

    def kl(x: float, y: float) -> float:
        return x * math.log(x / y) + (1 - x) * math.log((1 - x) / (1 - y))

    return max(kl(big_p, big_q), kl(big_q, big_p))


def expected_weights(
    p: list[float], b: list[float], mask: list[bool], owners: list[int], rule: RejectionSampling
) -> list[float]:
    finite = [m and math.isfinite(x - y) for x, y, m in zip(p, b, mask, strict=True)]
    weights = []
    for t in range(len(p)):
        if not finite[t]:
            weights.append(0.0)
            continue
        weight = math.exp(p[t] - b[t])
        scope = [t] if rule.level == "token" else [s for s in range(len(p)) if owners[s] == owners[t] and finite[s]]
        values = [metric_of(p[s], b[s], rule.metric) for s in scope]
        if rule.level == "token" or rule.agg == "max":
            value = max(values)
        elif rule.metric == "ratio":
            value = math.prod(values) ** (1.0 if rule.agg == "sum" else 1 / len(values))
        else:
            value = sum(values) / (1 if rule.agg == "sum" else len(values))
        lower = -math.inf if rule.lower is None else rule.lower
        if not lower <= value <= rule.upper:
            weight = 0.0 if rule.action == "mask" else min(max(weight, lower), rule.upper)
        weights.append(weight)
    return weights


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    owners = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    b = -3 * torch.rand(len(owners), dtype=torch.float64, generator=generator) - 0.01
    p = (b + 0.6 * torch.randn(len(owners), dtype=torch.float64, generator=generator)).clamp(max=-1e-3)
    mask = torch.rand(len(owners), generator=generator) < 0.75
    mask[0] = False  # a sequence without a trained token
    mask[4], p[4] = True, -torch.inf  # a trained token that was impossible
    mask[9], b[9] = True, torch.nan
    p[~mask], b[~mask] = torch.nan, torch.inf
    return p, b, mask, owners


def correct(p: torch.Tensor, b: torch.Tensor, rule: RejectionSampling | None) -> Correction:
    """All tokens trained, one sequence."""
    mask = torch.ones(len(p), dtype=torch.bool)
    return off_policy_correction(p, b, mask, torch.zeros(len(p), dtype=torch.int64), rule)


@pytest.mark.parametrize(
    ("level", "agg", "metric"),
    [("token", "mean", m) for m in ("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl")]
    + list(itertools.product(["sequence"], ["sum", "mean", "max"], ["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"])),
)
@pytest.mark.parametrize("action", ["mask", "clamp"])
@pytest.mark.parametrize(("lower", "upper"), [(None, 1.3), (0.8, 1.2), (0.02, 0.1), (None, 0.05)])
def test_every_option_against_plain_python(
    level: str, agg: str, metric: str, action: str, lower: float | None, upper: float
) -> None:
    if action == "clamp" and metric != "ratio":
        with pytest.raises(ValueError, match="clamp"):
            RejectionSampling(level, action, metric, agg, lower, upper)
        return
    if metric == "binary_kl" and upper > 1:
        upper = 1.0
    rule = RejectionSampling(level, action, metric, agg, lower, upper)
    for seed in range(4):
        p, b, mask, owners = batch(seed)
        got = off_policy_correction(p, b, mask, owners, rule)
        want = expected_weights(p.tolist(), b.tolist(), mask.tolist(), owners.tolist(), rule)
        torch.testing.assert_close(got.weights, torch.tensor(want, dtype=torch.float64))
        assert got.nonfinite.nonzero().flatten().tolist() == [4, 9]
        assert not (got.filtered & ~mask).any() and not (got.clamped & ~mask).any()
        assert (got.weights[got.filtered] == 0).all() and got.filtered[got.nonfinite].all()


def test_without_rejection_the_weight_is_the_ratio() -> None:
    p, b, mask, owners = batch(0)
    got = off_policy_correction(p, b, mask, owners)
    valid = mask & ~got.nonfinite
    torch.testing.assert_close(got.weights[valid], (p - b).exp()[valid])
    assert (got.weights[~valid] == 0).all()
    assert torch.equal(got.filtered, got.nonfinite)


def probability_band(q: float, rule: RejectionSampling) -> tuple[float, float]:
    """Smallest and largest kept train probability for the sampled probability q, as multiples of q."""
    p = torch.linspace(1e-7, 1.0, 400_001, dtype=torch.float64)
    got = correct(p.log(), torch.full_like(p, math.log(q)), rule)
    kept = p[~got.filtered]
    return float(kept.min()) / q, float(kept.max()) / q


@pytest.mark.parametrize(
    ("q", "low", "high", "digits"),
    [(0.9, 0.83, 1.09, 0.005), (0.5, 0.57, 1.43, 0.005), (0.1, 0.17, 2.57, 0.005), (0.01, 0.0, 8.1, 0.05)],
)
def test_kpop_keep_bands(q: float, low: float, high: float, digits: float) -> None:
    got_low, got_high = probability_band(q, RejectionSampling(metric="binary_kl"))
    assert got_low == pytest.approx(low, abs=max(digits, 0.005))
    assert got_high == pytest.approx(high, abs=digits)


def test_kpop_kept_tokens_still_weigh_the_ratio_and_the_ends_are_finite() -> None:
    p = torch.tensor([0.5, 0.6, 1.0, 1e-12, 0.0]).log()
    b = torch.tensor([0.5, 0.5, 1.0, 1e-9, 0.5]).log()
    got = correct(p, b, RejectionSampling(metric="binary_kl"))
    torch.testing.assert_close(got.weights, torch.tensor([1.0, 1.2, 1.0, 1e-3, 0.0]), rtol=1e-5, atol=0)
    assert got.nonfinite.tolist() == [False, False, False, False, True]


def test_kpop_default_is_a_tenth_and_values_above_one_warn() -> None:
    assert RejectionSampling(metric="binary_kl").upper == 0.1
    assert RejectionSampling().upper == 5.0
    with pytest.warns(UserWarning, match="almost nothing is masked"):
        RejectionSampling(metric="binary_kl", upper=2.0)


def test_icepop_keeps_ratios_between_half_and_five() -> None:
    ratios = torch.tensor([0.49, 0.51, 1.0, 4.9, 5.1])
    got = correct(ratios.log(), torch.zeros(5), RejectionSampling(lower=0.5, upper=5.0))
    torch.testing.assert_close(got.weights, torch.tensor([0.0, 0.51, 1.0, 4.9, 0.0]))
    assert got.filtered.tolist() == [True, False, False, False, True]


def test_tis_truncates_at_two() -> None:
    ratios = torch.tensor([0.01, 1.0, 1.9, 2.1, 1e6])
    got = correct(ratios.log(), torch.zeros(5), RejectionSampling(action="clamp", upper=2.0))
    torch.testing.assert_close(got.weights, torch.tensor([0.01, 1.0, 1.9, 2.0, 2.0]))
    assert got.clamped.tolist() == [False, False, False, True, True] and not got.filtered.any()


@pytest.mark.parametrize(("length", "total"), [(10, 2.6), (100, 13_780.6)])
def test_sequence_ratio_of_a_long_sequence_needs_the_geometric_mean(length: int, total: float) -> None:
    p, b = torch.full((length,), math.log(1.1)), torch.zeros(length)

    def kept(agg: str, upper: float) -> bool:
        return not correct(p, b, RejectionSampling("sequence", agg=agg, upper=upper)).filtered.any()

    assert kept("mean", 1.11) and not kept("mean", 1.09)
    assert kept("sum", total * 1.01) and not kept("sum", total * 0.99)


def test_sums_of_a_long_sequence_are_taken_in_fp64() -> None:
    # In fp32 a running sum of 2 ** 24 swallows every further 1.
    p = torch.zeros(100_001)
    b = torch.full((100_001,), -1.0)
    b[0] = 2.0**24 - 100_000
    rule = RejectionSampling(
        "sequence", metric="kl_k1", agg="sum", lower=2.0**24 - 200_000.5, upper=2.0**24 - 199_999.5
    )
    assert not correct(p, b, rule).filtered.any()


def test_differences_are_taken_in_fp32() -> None:
    p, b = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.001])
    assert correct(p, b, None).weights.item() == pytest.approx(math.exp(0.001), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "turn"}, "rejection_sampling.level is 'turn'"),
        ({"metric": "k1"}, "rejection_sampling.metric is 'k1'"),
        ({"action": "drop"}, "rejection_sampling.action is 'drop'"),
        ({"agg": "median"}, "rejection_sampling.agg is 'median'"),
        ({"lower": 3.0, "upper": 2.0}, "lower 3.0 is above upper 2.0"),
        ({"action": "clamp", "metric": "kl_k2"}, "cannot use metric kl_k2"),
    ],
)
def test_wrong_options_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RejectionSampling(**arguments)
