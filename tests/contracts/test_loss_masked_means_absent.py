"""Masked means absent: what lies under the mask changes no value, no gradient, no statistic and no metric."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from archon.batch import PackedBatch
from archon.losses import TokenOutputs
from areal.algorithms.grpo import GRPOLoss
from areal.rollout.trajectory import Trajectory, pack

TOOL_OUTPUT = slice(4, 9)
"""Tokens of every trajectory that no policy sampled."""


def make_batch(junk: float) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    trajectories = []
    for index in range(6):
        length = 12 + index
        mask = torch.ones(length, dtype=torch.bool)
        mask[:2] = False
        mask[TOOL_OUTPUT] = False
        trajectories.append(
            Trajectory(
                input_ids=torch.arange(length),
                loss_mask=mask,
                logprobs=torch.where(mask, -torch.rand(length, generator=generator) - 0.1, junk),
                versions=torch.where(mask, 1, -1),
                token_rewards=torch.where(mask, torch.rand(length, generator=generator), junk),
                reward=float(index % 3),
                finish_reason="stop",
                group_id=str(index // 3),
                episode_id=str(index),
            )
        )
    batch = pack(trajectories)
    noise = 0.4 * torch.randn((2, batch.num_tokens), generator=generator)
    behaviour, mask = batch["behaviour_logprobs"], batch.loss_mask
    return batch.with_tokens(
        prox_logprobs=torch.where(mask, behaviour + noise[0], junk),
        l=torch.where(mask, behaviour + noise[1], junk),
        h=torch.where(mask, noise[0].abs(), junk),
    )


def evaluate(loss: GRPOLoss, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    version = 2.0 if loss.prox_logp_method == "reuse" else 2.5
    batch = loss.prepare(batch).with_sequences(current_version=torch.full((6,), version, dtype=torch.float64))
    logprobs, entropy = batch["l"].clone().requires_grad_(), batch["h"].clone().requires_grad_()
    result = loss(TokenOutputs(logprobs=logprobs, entropy=entropy), batch)
    gradients = torch.autograd.grad(result.sum, [logprobs, entropy], allow_unused=True, materialize_grads=True)
    return result.sum.detach(), batch["advantages"], torch.stack(gradients), result.metrics


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalised": {"reward_norm": {}, "adv_norm": {"mean_level": "group"}, "discount": 0.9, "entropy_coef": 0.1},
    "sequence_mean": {"loss_aggregation": "sequence_mean", "c_clip": 1.5},
    "recompute": {"use_decoupled_loss": True, "rejection_sampling": {"lower": 0.8, "upper": 1.5}},
    "loglinear": {"use_decoupled_loss": True, "prox_logp_method": "loglinear", "rejection_sampling": {"upper": 1.5}},
    "kpop": {
        "use_decoupled_loss": True,
        "prox_logp_method": "reuse",
        "rejection_sampling": {"level": "sequence", "metric": "binary_kl", "agg": "max"},
    },
}


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30, -7.0])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_junk_under_the_mask_changes_nothing(options: dict[str, Any], junk: float) -> None:
    loss = GRPOLoss(**options)
    clean = evaluate(loss, make_batch(0.0))
    dirty = evaluate(loss, make_batch(junk))
    for got, want in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(got, want)
        assert got.isfinite().all()
    assert dirty[3] == clean[3]
    mask = make_batch(0.0).loss_mask
    assert (dirty[2][:, ~mask] == 0).all() and (dirty[1][~mask] == 0).all()


def test_masked_tokens_are_not_in_the_denominator() -> None:
    batch = make_batch(math.nan)
    trained = sum(12 + index - 2 - 5 for index in range(6))
    assert GRPOLoss().denominator(batch) == trained


def test_advantage_statistics_run_over_trained_tokens_only() -> None:
    loss = GRPOLoss(adv_norm={"std_level": None})
    batch = loss.prepare(make_batch(math.nan))
    assert batch["advantages"][batch.loss_mask].mean().item() == pytest.approx(0.0, abs=1e-6)


def test_a_trained_token_without_a_finite_behaviour_logprob_weighs_nothing_and_is_counted() -> None:
    for options in ({}, {"use_decoupled_loss": True}):
        loss = GRPOLoss(**options)
        batch = make_batch(0.0)
        behaviour = batch["behaviour_logprobs"].clone()
        behaviour[2] = math.nan
        batch = batch.with_tokens(behaviour_logprobs=behaviour)
        value, _, gradients, metrics = evaluate(loss, batch)
        assert value.isfinite() and gradients.isfinite().all() and gradients[0, 2] == 0
        assert metrics["rejection/nonfinite"][0] == 1
