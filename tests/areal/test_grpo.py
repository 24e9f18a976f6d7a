"""GRPOLoss end to end on ragged packed batches: against a plain Python reference, options, errors and metrics."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from archon.batch import PackedBatch
from archon.losses import LossFn, LossSpec, TokenOutputs
from areal.algorithms.grpo import GRPOLoss
from areal.algorithms.proximal import loglinear_logprobs
from areal.rollout.trajectory import Trajectory, pack

GROUPS = [0, 0, 0, 1, 1, 2, 2, 2]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0, 1.0]
GROUP_NORM = {"mean_level": "group", "std_level": "group"}


def ragged_batch(seed: int = 0, junk: float = math.nan) -> PackedBatch:
    """Eight trajectories of 2 to 19 tokens with gaps in their masks and junk in every column under them."""
    generator = torch.Generator().manual_seed(seed)
    trajectories = []
    for index, (group, reward) in enumerate(zip(GROUPS, REWARDS, strict=True)):
        length = 2 + int(torch.randint(18, (1,), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.7
        mask[0], mask[1] = False, True
        trajectories.append(
            Trajectory(
                input_ids=torch.randint(50, (length,), generator=generator),
                loss_mask=mask,
                logprobs=torch.where(mask, -2 * torch.rand(length, generator=generator) - 0.05, junk),
                versions=torch.where(mask, 3, -1),
                token_rewards=torch.where(mask, 0.0, junk),
                reward=reward,
                finish_reason="length" if index % 3 == 2 else "stop",
                group_id=f"g{group}",
                episode_id=f"e{index}",
            )
        )
    batch = pack(trajectories)
    noise = 0.5 * torch.randn(batch.num_tokens, generator=generator)
    proximal = torch.where(batch.loss_mask, batch["behaviour_logprobs"] + noise, junk)
    return batch.with_tokens(prox_logprobs=proximal)


def at_version(batch: PackedBatch, version: float) -> PackedBatch:
    """With the column that the engine adds: completed steps and the fraction of this step's updates."""
    return batch.with_sequences(current_version=torch.full((batch.num_sequences,), version, dtype=torch.float64))


def current_logprobs(batch: PackedBatch, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = 0.3 * torch.randn(batch.num_tokens, dtype=torch.float64, generator=generator)
    return (batch["prox_logprobs"].double() + noise).requires_grad_()


def reference(batch: PackedBatch, logprobs: list[float], **options: Any) -> tuple[float, list[float]]:
    """(loss, its gradient) by loops over tokens, for group-normalised rewards without discount."""
    decoupled, how = options["use_decoupled_loss"], options["loss_aggregation"]
    eps, eps_high, c_clip = 0.2, 0.28, 3.0
    cu = batch.cu_seqlens.tolist()
    mask, b = batch.loss_mask.tolist(), batch["behaviour_logprobs"].tolist()
    p = batch["prox_logprobs"].tolist() if decoupled else b
    trained = [sum(mask[cu[n] : cu[n + 1]]) for n in range(len(GROUPS))]
    count = {"token_mean": sum(trained), "sequence_mean": len(trained), "constant": len(trained) * 32}[how]
    loss, gradient = 0.0, [0.0] * len(mask)
    for n, group in enumerate(GROUPS):
        mine = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        advantage = (REWARDS[n] - statistics.fmean(mine)) / (statistics.stdev(mine) + 1e-5)
        for t in range(cu[n], cu[n + 1]):
            if not mask[t]:
                continue
            weight = math.exp(p[t] - b[t]) if decoupled else 1.0
            if decoupled and not 0.5 <= weight <= 2.0:
                continue
            weight /= count * (trained[n] if how == "sequence_mean" else 1)
            ratio = math.exp(logprobs[t] - p[t])
            value, slope = -advantage * ratio, -advantage * ratio
            bound = -advantage * min(max(ratio, 1 - eps), 1 + eps_high)
            if bound > value:
                value, slope = bound, 0.0
            if advantage < 0 and value > -c_clip * advantage:
                value, slope = -c_clip * advantage, 0.0
            loss += weight * value
            gradient[t] = weight * slope
    return loss, gradient


@pytest.mark.parametrize("loss_aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("use_decoupled_loss", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_the_reference(seed: int, use_decoupled_loss: bool, loss_aggregation: str) -> None:
    options: dict[str, Any] = {"use_decoupled_loss": use_decoupled_loss, "loss_aggregation": loss_aggregation}
    rejection = {"lower": 0.5, "upper": 2.0} if use_decoupled_loss else None
    loss = GRPOLoss(
        eps_clip_higher=0.28,
        c_clip=3.0,
        reward_norm=GROUP_NORM,
        max_new_tokens=32,
        rejection_sampling=rejection,
        **options,
    )
    batch = loss.prepare(ragged_batch(seed))
    logprobs = current_logprobs(batch, seed)
    result = loss(TokenOutputs(logprobs=logprobs), batch)
    total = result.sum / loss.denominator(batch)
    (gradient,) = torch.autograd.grad(total, logprobs)
    want, want_gradient = reference(batch, logprobs.tolist(), **options)
    assert total.item() == pytest.approx(want, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(want_gradient, dtype=torch.float64), rtol=1e-5, atol=1e-7)
    value, count = result.metrics["loss/policy"]
    assert (value / count).item() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
@pytest.mark.parametrize("loss_aggregation", ["token_mean", "sequence_mean"])
def test_entropy_bonus_is_a_separate_term_with_gradient(coefficient: float, loss_aggregation: str) -> None:
    loss = GRPOLoss(entropy_coef=coefficient, loss_aggregation=loss_aggregation)
    assert loss.outputs == (("logprobs", "entropy") if coefficient else ("logprobs",))
    batch = loss.prepare(ragged_batch())
    entropy = torch.where(batch.loss_mask, 1.5, torch.nan).requires_grad_()
    outputs = TokenOutputs(logprobs=current_logprobs(batch), entropy=entropy)
    result = loss(outputs, batch)
    without = GRPOLoss(loss_aggregation=loss_aggregation)(outputs, batch)
    difference = (result.sum - without.sum) / loss.denominator(batch)
    assert difference.item() == pytest.approx(-coefficient * 1.5, rel=1e-5)
    assert ("entropy/mean" in result.metrics) == bool(coefficient)
    if coefficient:
        (gradient,) = torch.autograd.grad(result.sum, entropy)
        assert (gradient[~batch.loss_mask] == 0).all()
        assert gradient.sum().item() == pytest.approx(-coefficient * loss.denominator(batch).item(), rel=1e-5)


def test_order_of_reward_operations() -> None:
    """Penalty on the raw reward, then bias, scaling, clip, then normalisation, then zero for truncated ones."""
    loss = GRPOLoss(
        reward_bias=-0.5,
        reward_scaling=10.0,
        reward_clip=4.0,
        reward_norm={"mean_level": "group", "std_level": None},
        overlong_reward_penalty=True,
        overlong_tokens=8,
        overlong_penalty_factor=1.0,
        max_new_tokens=14,
        mask_no_eos_with_zero=True,
    )
    batch = loss.prepare(ragged_batch(5))
    cu, mask = batch.cu_seqlens.tolist(), batch.loss_mask.tolist()
    raw = []
    for n, reward in enumerate(REWARDS):
        trained = sum(mask[cu[n] : cu[n + 1]])
        raw.append(reward - min(max((trained - 6) / 8, 0.0), 1.0))
    assert raw != REWARDS  # the batch has an overlong response
    clipped = [min(max((r - 0.5) * 10, -4.0), 4.0) for r in raw]
    for n, group in enumerate(GROUPS):
        mean = statistics.fmean(r for r, g in zip(clipped, GROUPS, strict=True) if g == group)
        want = 0.0 if n % 3 == 2 else clipped[n] - mean
        assert batch["shaped_reward"][n].item() == pytest.approx(want, abs=1e-6)
        advantages = batch["advantages"][cu[n] : cu[n + 1]]
        trained_here = batch.loss_mask[cu[n] : cu[n + 1]]
        torch.testing.assert_close(advantages, torch.where(trained_here, batch["shaped_reward"][n], 0.0))


def test_advantage_normalisation_runs_over_trained_tokens() -> None:
    loss = GRPOLoss(adv_norm={}, discount=0.9)
    batch = loss.prepare(ragged_batch())
    advantages = batch["advantages"][batch.loss_mask].double()
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert advantages.std().item() == pytest.approx(1.0, abs=1e-4)


def test_reuse_gives_ratio_one_and_weighs_by_the_current_policy() -> None:
    loss = GRPOLoss(use_decoupled_loss=True, prox_logp_method="reuse")
    batch = at_version(loss.prepare(ragged_batch()), 4.0)
    logprobs = current_logprobs(batch)
    result = loss(TokenOutputs(logprobs=logprobs), batch)
    value, count = result.metrics["ratio/mean"]
    assert value == count == batch.loss_mask.sum()
    (gradient,) = torch.autograd.grad(result.sum, logprobs)
    weights = (logprobs.detach() - batch["behaviour_logprobs"]).exp()
    expected = torch.where(batch.loss_mask, -batch["advantages"] * weights, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_reuse_is_refused_after_the_first_update_of_a_step() -> None:
    loss = GRPOLoss(use_decoupled_loss=True, prox_logp_method="reuse")
    batch = at_version(loss.prepare(ragged_batch()), 4.5)
    with pytest.raises(ValueError, match="ppo_n_minibatches to 1"):
        loss(TokenOutputs(logprobs=current_logprobs(batch)), batch)


@pytest.mark.parametrize(
    ("behaviour", "proximal", "current", "alpha"),
    [(3, 5.0, 5.0, 1.0), (5, 5.0, 5.0, 1.0), (5, 5.0, 5.5, 0.0), (4, 5.0, 5.5, 2 / 3), (1, 5.0, 5.75, 4 / 4.75)],
)
def test_loglinear_interpolates_by_versions(behaviour: int, proximal: float, current: float, alpha: float) -> None:
    got = loglinear_logprobs(
        torch.tensor([-1.0]),
        torch.tensor([-3.0]),
        torch.tensor([behaviour], dtype=torch.int32),
        proximal_version=torch.tensor(proximal),
        current_version=torch.tensor(current),
    )
    assert got.item() == pytest.approx(-3.0 + alpha * 2.0, abs=1e-6)


def test_loglinear_takes_no_gradient_and_reads_the_version_of_the_step() -> None:
    loss = GRPOLoss(use_decoupled_loss=True, prox_logp_method="loglinear")
    batch = at_version(loss.prepare(ragged_batch()), 4.5)
    logprobs = current_logprobs(batch)
    result = loss(TokenOutputs(logprobs=logprobs), batch)
    behaviour = batch["behaviour_logprobs"].double()
    ratio = ((logprobs.detach() - behaviour) / 3).exp()  # tokens of version 3: p is two thirds of the way from b to l
    value, count = result.metrics["ratio/mean"]
    assert (value / count).item() == pytest.approx(ratio[batch.loss_mask].mean().item(), rel=1e-6)


def test_metrics_are_masked_means_and_name_what_was_dropped() -> None:
    batch = ragged_batch()
    behaviour = batch["behaviour_logprobs"].clone()
    first, second = batch.loss_mask.nonzero().flatten()[:2].tolist()
    behaviour[first] = -torch.inf
    proximal = batch["prox_logprobs"].clone()
    proximal[second] = behaviour[second] + 5.0
    batch = batch.with_tokens(behaviour_logprobs=behaviour, prox_logprobs=proximal)
    loss = GRPOLoss(use_decoupled_loss=True, rejection_sampling={"upper": 5.0, "lower": 0.0}, c_clip=2.0)
    batch = loss.prepare(batch)
    logprobs = current_logprobs(batch)
    means = {k: (s / n).item() for k, (s, n) in loss(TokenOutputs(logprobs=logprobs), batch).metrics.items()}
    mask = batch.loss_mask.clone()
    trained = int(mask.sum())
    d = proximal.double() - behaviour
    outside = mask & (d.isinf() | (d.exp() > 5.0))
    assert means["rejection/nonfinite"] == pytest.approx(1 / trained)
    assert means["rejection/filtered_fraction"] == pytest.approx(int(outside.sum()) / trained)
    assert int(outside.sum()) >= 2
    kept = mask & ~outside
    ratio = (logprobs.detach() - proximal).exp()[kept]
    assert means["ratio/mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert means["kl/approx"] == pytest.approx((ratio - 1 - ratio.log()).mean().item(), rel=1e-4)
    finite = d[mask & d.isfinite()]
    assert means["importance_weight/mean"] == pytest.approx(finite.exp().mean().item(), rel=1e-5)
    assert means["kl/behaviour_proximal"] == pytest.approx((finite.exp() - 1 - finite).mean().item(), rel=1e-5)
    assert means["reward/shaped"] == pytest.approx(statistics.fmean(REWARDS))
    assert means["truncated/fraction"] == pytest.approx(2 / 8)
    advantages = batch["advantages"][kept]
    over = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    assert means["clip/fraction"] == pytest.approx(over.double().mean().item())
    assert all(math.isfinite(value) for value in means.values())


def test_loss_crosses_a_process_border_as_text() -> None:
    spec = LossSpec(
        "areal.algorithms.grpo.GRPOLoss",
        {"reward_norm": GROUP_NORM, "use_decoupled_loss": True, "rejection_sampling": {"metric": "binary_kl"}},
    )
    assert isinstance(spec.build(), LossFn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps_clip": -0.1}, "eps_clip is -0.1"),
        ({"eps_clip_higher": -1.0}, "eps_clip_higher is -1.0"),
        ({"c_clip": 1.0}, "c_clip is 1.0"),
        ({"reward_clip": 0.0}, "reward_clip is 0.0"),
        ({"discount": 1.5}, "discount is 1.5"),
        ({"gae_lambda": -1}, "gae_lambda is -1"),
        ({"prox_logp_method": "guess"}, "prox_logp_method is 'guess'"),
        ({"loss_aggregation": "mean"}, "loss_aggregation is 'mean'"),
        ({"loss_aggregation": "constant"}, "max_new_tokens"),
        ({"rejection_sampling": {}}, "use_decoupled_loss"),
        ({"overlong_reward_penalty": True, "overlong_tokens": 4, "max_new_tokens": 8}, "overlong_penalty_factor"),
        (
            {
                "overlong_reward_penalty": True,
                "overlong_tokens": 9,
                "overlong_penalty_factor": 1.0,
                "max_new_tokens": 8,
            },
            "overlong_tokens 9 is above max_new_tokens 8",
        ),
    ],
)
def test_wrong_options_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOLoss(**arguments)


def test_recompute_without_proximal_logprobs_says_what_to_do() -> None:
    batch = ragged_batch()
    del batch.tokens["prox_logprobs"]
    with pytest.raises(ValueError, match="prox_logprobs"):
        GRPOLoss(use_decoupled_loss=True).prepare(batch)
