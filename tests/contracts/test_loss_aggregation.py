"""One denominator: a loss and its metrics do not depend on how the batch was cut, ordered or packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archon.batch import PackedBatch, micro_batches
from archon.losses import TokenOutputs
from areal.algorithms.grpo import GRPOLoss
from areal.rollout.trajectory import Trajectory, pack

LENGTHS = [2, 98, 3, 5, 40, 7]

OPTIONS: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sequence_mean": {"loss_aggregation": "sequence_mean"},
    "constant": {"loss_aggregation": "constant", "max_new_tokens": 100},
    "entropy": {"entropy_coef": 0.1},
    "sequence_rejection": {
        "use_decoupled_loss": True,
        "rejection_sampling": {"level": "sequence", "lower": 0.95, "upper": 1.05},
    },
    "adv_norm": {"adv_norm": {}, "discount": 0.97},
}


def make_batch() -> PackedBatch:
    generator = torch.Generator().manual_seed(3)
    trajectories = []
    for index, length in enumerate(LENGTHS):
        mask = torch.ones(length, dtype=torch.bool)
        mask[0] = False
        trajectories.append(
            Trajectory(
                input_ids=torch.zeros(length, dtype=torch.int64),
                loss_mask=mask,
                logprobs=torch.where(mask, -1 - torch.rand(length, generator=generator), 0.0),
                versions=torch.where(mask, 0, -1),
                reward=float(index % 2),
                finish_reason="stop",
                group_id=str(index // 3),
                episode_id=str(index),
            )
        )
    batch = pack(trajectories)
    noise = torch.randn((2, batch.num_tokens), generator=generator)
    behaviour = batch["behaviour_logprobs"]
    return batch.with_tokens(
        prox_logprobs=behaviour + 0.2 * noise[0], l=behaviour.double() + 0.3 * noise[1], h=noise[0].double().abs()
    )


def run(loss: GRPOLoss, batch: PackedBatch, parts: list[list[int]]) -> tuple[torch.Tensor, dict[str, float]]:
    """(gradient by token in the order of ``batch``, metrics) when the prepared batch is cut into ``parts``."""
    total = loss.denominator(batch)
    gradient = torch.full((batch.num_tokens,), torch.nan, dtype=torch.float64)
    sums: dict[str, tuple[float, float]] = {"total": (0.0, 1.0)}
    for part in parts:
        piece = batch.select(part)
        logprobs = piece["l"].clone().requires_grad_()
        result = loss(TokenOutputs(logprobs=logprobs, entropy=piece["h"]), piece)
        value = result.sum / total
        gradient[batch.token_index(part)] = torch.autograd.grad(value, logprobs)[0]
        for name, (amount, count) in [*result.metrics.items(), ("total", (value.detach(), torch.zeros(())))]:
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + float(amount), before[1] + float(count))
    return gradient, {name: amount / count for name, (amount, count) in sums.items() if count}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    "parts",
    [[[0], [1], [2], [3], [4], [5]], [[1], [0, 2, 3, 4, 5]], [[0, 1, 2], [3, 4, 5]], [[5, 3], [4, 0, 2], [1]]],
    ids=["six", "uneven", "halves", "shuffled"],
)
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(options: dict[str, Any], parts: list[list[int]]) -> None:
    loss = GRPOLoss(reward_norm={"mean_level": "group", "std_level": "group"}, **options)
    batch = loss.prepare(make_batch())
    whole_gradient, whole = run(loss, batch, [list(range(len(LENGTHS)))])
    gradient, metrics = run(loss, batch, parts)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-15)
    assert metrics == pytest.approx(whole, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_loss_gradient_and_metrics_do_not_depend_on_the_packing_order(options: dict[str, Any]) -> None:
    loss = GRPOLoss(reward_norm={"mean_level": "group", "std_level": "group"}, **options)
    batch, order = make_batch(), [4, 0, 5, 2, 1, 3]
    prepared = loss.prepare(batch)
    gradient, metrics = run(loss, prepared, [list(range(len(LENGTHS)))])
    other_gradient, other = run(loss, loss.prepare(batch.select(order)), micro_batches(batch.select(order), 50))
    torch.testing.assert_close(other_gradient, gradient[batch.token_index(order)], rtol=1e-6, atol=1e-12)
    assert other == pytest.approx(metrics, rel=1e-6, abs=1e-9)


def test_token_mean_weighs_every_token_the_same_however_long_its_sequence() -> None:
    loss = GRPOLoss(reward_norm=None)
    batch = loss.prepare(make_batch())
    batch = batch.with_tokens(l=batch["behaviour_logprobs"].double(), advantages=torch.ones(batch.num_tokens))
    gradient, _ = run(loss, batch, [[0], [1], [2, 3, 4, 5]])
    trained = int(batch.loss_mask.sum())
    expected = torch.where(batch.loss_mask, -1.0 / trained, 0.0).double()
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)


def test_sequence_mean_weighs_every_sequence_the_same() -> None:
    loss = GRPOLoss(loss_aggregation="sequence_mean")
    batch = loss.prepare(make_batch())
    batch = batch.with_tokens(l=batch["behaviour_logprobs"].double(), advantages=torch.ones(batch.num_tokens))
    gradient, _ = run(loss, batch, [[0, 1], [2, 3, 4, 5]])
    per_sequence = torch.zeros(len(LENGTHS), dtype=torch.float64).index_add_(0, batch.sequence_ids, gradient)
    torch.testing.assert_close(per_sequence, torch.full_like(per_sequence, -1 / len(LENGTHS)), rtol=1e-6, atol=0)


def test_rejected_tokens_stay_in_the_denominator() -> None:
    plain = GRPOLoss(use_decoupled_loss=True)
    strict = GRPOLoss(use_decoupled_loss=True, rejection_sampling={"lower": 0.9, "upper": 1.1})
    batch = plain.prepare(make_batch())
    assert strict.denominator(batch) == plain.denominator(batch) == sum(LENGTHS) - len(LENGTHS)
    gradient, metrics = run(strict, batch, [list(range(len(LENGTHS)))])
    reference, _ = run(plain, batch, [list(range(len(LENGTHS)))])
    ratio = (batch["prox_logprobs"] - batch["behaviour_logprobs"]).exp()
    kept = (ratio >= 0.9) & (ratio <= 1.1)
    assert 0 < metrics["rejection/filtered_fraction"] < 1
    torch.testing.assert_close(gradient, torch.where(kept, reference, 0.0), rtol=0, atol=0)


def test_a_sequence_without_a_trained_token_does_not_count_in_sequence_mean() -> None:
    loss = GRPOLoss(loss_aggregation="sequence_mean")
    batch = make_batch()
    mask = batch.loss_mask & (batch.sequence_ids != 1)
    assert loss.denominator(batch.with_tokens(loss_mask=mask)) == len(LENGTHS) - 1
