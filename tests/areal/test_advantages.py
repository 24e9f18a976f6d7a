"""Overlong penalty, reward shaping, reward placement and GAE against loops over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithms.advantages import generalized_advantages, overlong_penalty, place_rewards, scale_rewards
from areal.algorithms.segments import segment_suffix_sum


def test_overlong_penalty_rises_linearly_over_the_last_tokens() -> None:
    lengths = torch.tensor([0, 60, 80, 90, 99, 100, 150])
    penalty = overlong_penalty(lengths, max_new_tokens=100, overlong_tokens=20, factor=2.0)
    expected = torch.tensor([0.0, 0.0, 0.0, -1.0, -1.9, -2.0, -2.0], dtype=torch.float64)
    torch.testing.assert_close(penalty, expected)


def test_bias_comes_before_scaling_and_clipping_last() -> None:
    rewards = scale_rewards(torch.tensor([0.0, 0.5, 1.0, 9.0]), bias=-0.5, scaling=10.0, clip=20.0)
    assert rewards.tolist() == [-5.0, 0.0, 5.0, 20.0]


def test_reward_lands_on_the_last_trained_token_and_untrained_rewards_are_absent() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    owners = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3])
    token_rewards = torch.where(mask, 0.25, torch.nan)
    placed = place_rewards(token_rewards, torch.tensor([1.0, 2.0, 100.0, 4.0]), mask, owners)
    assert placed.tolist() == [0, 0.25, 1.25, 0, 0, 2.25, 0, 0, 0, 0, 4.25]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    decay=st.sampled_from([0.0, 0.5, 0.95, 0.999, 1.0]),
    seed=st.integers(0, 1000),
)
def test_suffix_sum_equals_the_recurrence(lengths: list[int], decay: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), dtype=torch.float64, generator=generator)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    expected, carry = values.clone(), 0.0
    for t in reversed(range(len(values))):
        carry = 0.0 if t + 1 < len(values) and ids[t + 1] != ids[t] else carry
        carry = float(values[t]) + decay * carry
        expected[t] = carry
    torch.testing.assert_close(segment_suffix_sum(values, ids, decay), expected, rtol=1e-12, atol=1e-12)


def test_suffix_sum_of_a_segment_is_untouched_by_a_broken_neighbour() -> None:
    values = torch.tensor([1.0, 2.0, torch.nan, torch.inf, 3.0])
    got = segment_suffix_sum(values, torch.tensor([0, 0, 1, 1, 2]), 1.0)
    assert got[[0, 1, 4]].tolist() == [3.0, 2.0, 3.0]


def test_suffix_sum_of_nothing() -> None:
    assert segment_suffix_sum(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0.9).shape == (0,)


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (1.0, 0.9), (0.5, 0.8), (0.9, 0.0)])
def test_gae_carries_the_state_through_untrained_tokens(discount: float, gae_lambda: float) -> None:
    # Two turns with tool output between them, and a neighbour that must not leak in.
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    owners = torch.tensor([0] * 9 + [1] * 2)
    rewards = torch.where(mask, 0.0, torch.nan)
    rewards[[2, 7, 10]] = torch.tensor([0.5, 2.0, -7.0])
    step = discount * gae_lambda
    expected = torch.zeros(11, dtype=torch.float64)
    expected[7] = 2.0
    expected[6] = step * 2.0
    expected[2] = 0.5 + step**2 * 2.0
    expected[1] = step * (0.5 + step**2 * 2.0)
    expected[10] = -7.0
    got = generalized_advantages(rewards, mask, owners, discount=discount, gae_lambda=gae_lambda)
    torch.testing.assert_close(got, expected)


def test_without_discount_every_trained_token_gets_the_reward_exactly() -> None:
    lengths = torch.tensor([1000, 1, 37])
    owners = torch.arange(3).repeat_interleave(lengths)
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    rewards = torch.tensor([0.1, 1 / 3, -0.7], dtype=torch.float64)
    placed = place_rewards(torch.zeros(len(mask)), rewards, mask, owners)
    advantages = generalized_advantages(placed, mask, owners, discount=1.0, gae_lambda=1.0)
    assert torch.equal(advantages, rewards[owners])
