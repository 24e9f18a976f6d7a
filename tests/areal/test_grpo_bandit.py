"""GRPO on a bandit of five symbols: it finds the best one, also from tokens that are four versions old."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archon.batch import PackedBatch
from archon.losses import TokenOutputs
from areal.algorithms.grpo import GRPOLoss
from areal.rollout.trajectory import Trajectory, pack

REWARDS = [0.1, 0.4, 0.0, 1.0, 0.6]
GROUPS, SAMPLES = 4, 8


def sample_batch(policy: torch.Tensor, version: int, generator: torch.Generator) -> PackedBatch:
    """One action per sequence, after a prompt of one token."""
    logprobs = policy.log_softmax(-1)
    actions = torch.multinomial(logprobs.exp(), GROUPS * SAMPLES, replacement=True, generator=generator).tolist()
    return pack(
        [
            Trajectory(
                input_ids=torch.tensor([0, action]),
                loss_mask=torch.tensor([False, True]),
                logprobs=torch.tensor([0.0, float(logprobs[action])]),
                versions=torch.tensor([-1, version]),
                reward=REWARDS[action],
                finish_reason="stop",
                group_id=str(index // SAMPLES),
                episode_id=str(index),
            )
            for index, action in enumerate(actions)
        ]
    )


def score(policy: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    logprobs = policy.log_softmax(-1)[batch.input_ids]
    return torch.where(batch.loss_mask, logprobs, 0.0)


def train(loss: GRPOLoss, *, staleness: int, steps: int = 150, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    policy = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.Adam([policy], lr=0.1)
    history = [policy.detach().clone()]
    for step in range(steps):
        behaviour = max(0, step - staleness)
        batch = sample_batch(history[behaviour], behaviour, generator)
        batch = batch.with_tokens(prox_logprobs=score(policy.detach(), batch))
        batch = loss.prepare(batch)
        for update in range(2):
            now = torch.full((batch.num_sequences,), step + update / 2, dtype=torch.float64)
            part = batch.with_sequences(current_version=now)
            total = loss(TokenOutputs(logprobs=score(policy, part)), part).sum / loss.denominator(part)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        history.append(policy.detach().clone())
    return policy.detach().softmax(-1)


NORM = {"mean_level": "group", "std_level": "group"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_aggregation": "sequence_mean"},
        {"loss_aggregation": "constant", "max_new_tokens": 1},
        {"reward_norm": {"mean_level": "group", "mean_leave1out": True, "std_level": None}},
        {"reward_norm": None, "adv_norm": {}},
    ],
    ids=["grpo", "sequence_mean", "dr_grpo", "rloo", "batch_advantages"],
)
def test_on_policy_it_reaches_the_best_symbol(options: dict[str, Any]) -> None:
    probabilities = train(GRPOLoss(**{"reward_norm": NORM, **options}), staleness=0)
    assert probabilities[3] > 0.95


@pytest.mark.parametrize("prox_logp_method", ["recompute", "loglinear"])
@pytest.mark.parametrize(
    "rejection",
    [{"lower": 0.5, "upper": 5.0}, {"action": "clamp", "upper": 2.0}, {"metric": "binary_kl"}],
    ids=["icepop", "tis", "kpop"],
)
def test_from_tokens_four_versions_old_it_does_too(rejection: dict[str, Any], prox_logp_method: Any) -> None:
    loss = GRPOLoss(
        reward_norm=NORM, use_decoupled_loss=True, prox_logp_method=prox_logp_method, rejection_sampling=rejection
    )
    assert train(loss, staleness=4)[3] > 0.95


def test_expected_stale_gradient_is_the_policy_gradient() -> None:
    """Over all symbols, weighted by their behaviour probability, exp(p - b) restores the gradient of E[reward]."""
    policy = torch.tensor([0.3, -0.2, 0.5, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([0.0, 0.5, -0.5, 0.2, 0.0], dtype=torch.float64).softmax(-1)
    exact = torch.autograd.grad(-(policy.softmax(-1) * torch.tensor(REWARDS, dtype=torch.float64)).sum(), policy)[0]
    batch = PackedBatch(
        torch.tensor([0, 0, 0, 1, 0, 2, 0, 3, 0, 4]),
        torch.arange(0, 11, 2),
        {
            "loss_mask": torch.tensor([False, True] * 5),
            "behaviour_logprobs": behaviour.log().repeat_interleave(2),
            "prox_logprobs": policy.detach().log_softmax(-1).repeat_interleave(2),
            "advantages": torch.tensor(REWARDS, dtype=torch.float64).repeat_interleave(2),
        },
        {"shaped_reward": torch.tensor(REWARDS), "truncated": torch.zeros(5, dtype=torch.bool)},
    )
    loss = GRPOLoss(use_decoupled_loss=True)
    total = torch.zeros(5, dtype=torch.float64)
    for symbol in range(5):
        one = batch.select([symbol])
        value = loss(TokenOutputs(logprobs=score(policy, one)), one).sum
        total += behaviour[symbol] * torch.autograd.grad(value, policy)[0]
    torch.testing.assert_close(total, exact, rtol=1e-9, atol=1e-12)
