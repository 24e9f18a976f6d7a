"""Groups are true prompt groups of any size, their entries are episodes, and a reward of 0 is a reward."""

from __future__ import annotations

import statistics

import pytest
import torch

from archon.batch import PackedBatch
from areal.algorithms.filters import drop_uniform_rewards
from areal.algorithms.grpo import GRPOLoss
from areal.rollout.trajectory import Trajectory, pack

GROUP_NORM = {"mean_level": "group", "std_level": "group"}


def sample(reward: float, group: str, episode: str, turn: int = 0, length: int = 5) -> Trajectory:
    mask = torch.ones(length, dtype=torch.bool)
    mask[0] = False
    return Trajectory(
        input_ids=torch.arange(length),
        loss_mask=mask,
        logprobs=torch.where(mask, -1.0, 0.0),
        versions=torch.where(mask, 0, -1),
        reward=reward,
        finish_reason="stop",
        prompt_id="same first message",
        group_id=group,
        episode_id=episode,
        turn=turn,
    )


def shaped(trajectories: list[Trajectory], **options: object) -> list[float]:
    batch: PackedBatch = GRPOLoss(**options).prepare(pack(trajectories))  # type: ignore[arg-type]
    return batch["shaped_reward"].tolist()


def test_short_groups_have_zero_mean_and_no_exploding_value() -> None:
    rewards = [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.0, 1.0]
    groups = ["a"] * 3 + ["b"] * 2 + ["c"] * 3
    got = shaped(
        [sample(r, g, str(i)) for i, (r, g) in enumerate(zip(rewards, groups, strict=True))], reward_norm=GROUP_NORM
    )
    for group in "abc":
        assert statistics.fmean(x for x, g in zip(got, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-6)
    assert max(map(abs, got)) < 3


def test_groups_need_not_be_neighbours() -> None:
    got = shaped(
        [sample(r, g, str(i)) for i, (r, g) in enumerate([(1, "a"), (5, "b"), (0, "a"), (7, "b")])],
        reward_norm={"mean_level": "group", "std_level": None},
    )
    assert got == pytest.approx([0.5, -1.0, -0.5, 1.0])


def test_a_batch_smaller_than_a_group_and_a_lone_sample() -> None:
    assert shaped([sample(1.0, "a", "0")], reward_norm=GROUP_NORM) == [0.0]
    got = shaped([sample(1.0, "a", "0"), sample(1.0, "b", "1"), sample(0.0, "b", "2")], reward_norm=GROUP_NORM)
    assert got[0] == 0.0 and max(map(abs, got)) < 3


def test_prompts_with_a_common_beginning_are_distinct_groups() -> None:
    got = shaped(
        [sample(r, g, str(i)) for i, (r, g) in enumerate([(1, "a"), (1, "a"), (0, "b"), (0, "b")])],
        reward_norm=GROUP_NORM,
    )
    assert got == [0.0] * 4


def test_every_turn_of_an_episode_gets_its_advantage() -> None:
    turns = [sample(1.0, "a", "long", turn) for turn in range(3)] + [sample(0.0, "a", "short")]
    batch = GRPOLoss(reward_norm=GROUP_NORM).prepare(pack(turns))
    for index, want in enumerate([1, 1, 1, -1]):
        advantages = batch.select([index])["advantages"]
        torch.testing.assert_close(advantages, torch.tensor([0.0] + [want * 0.5**0.5] * 4), rtol=1e-4, atol=0)


def test_the_number_of_turns_does_not_move_the_baseline() -> None:
    norm = {"mean_level": "group", "std_level": None}
    short = shaped([sample(1.0, "a", "0"), sample(0.0, "a", "1"), sample(0.0, "a", "2")], reward_norm=norm)
    long = shaped(
        [sample(1.0, "a", "0", turn) for turn in range(9)] + [sample(0.0, "a", "1"), sample(0.0, "a", "2")],
        reward_norm=norm,
    )
    assert short == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert long == pytest.approx([2 / 3] * 9 + [-1 / 3] * 2)


@pytest.mark.parametrize(
    ("mean_level", "std_level", "expected"),
    [
        ("group", None, [0.5, -0.5, 1.0, -1.0]),
        ("batch", None, [-0.75, -1.75, 2.25, 0.25]),
        (None, "group", [1 / 0.5**0.5, 0.0, 4 / 2**0.5, 2 / 2**0.5]),
        ("group", "batch", [0.5 / 1.7078, -0.5 / 1.7078, 1 / 1.7078, -1 / 1.7078]),
        ("batch", "group", [-0.75 / 0.5**0.5, -1.75 / 0.5**0.5, 2.25 / 2**0.5, 0.25 / 2**0.5]),
        (None, None, [1.0, 0.0, 4.0, 2.0]),
    ],
)
def test_mean_and_std_levels_are_not_swapped(
    mean_level: str | None, std_level: str | None, expected: list[float]
) -> None:
    rows = [(1.0, "a"), (0.0, "a"), (4.0, "b"), (2.0, "b")]
    got = shaped(
        [sample(r, g, str(i)) for i, (r, g) in enumerate(rows)],
        reward_norm={"mean_level": mean_level, "std_level": std_level},
    )
    assert got == pytest.approx(expected, rel=1e-3)


def test_a_reward_of_zero_is_a_reward() -> None:
    got = shaped([sample(0.0, "a", "0"), sample(0.0, "a", "1")], reward_bias=-0.5, reward_scaling=10.0)
    assert got == [-5.0, -5.0]
    got = shaped([sample(0.0, "a", "0"), sample(2.0, "a", "1")], reward_norm={"mean_level": "group", "std_level": None})
    assert got == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([1.0, 1.0, 1.0], False),
        ([0.0, 0.0], False),
        ([0.0, 1.0], True),
        ([0.0], False),
        ([0.5, 0.5, 0.4999], True),
        ([], False),
    ],
)
def test_dynamic_filter_drops_groups_whose_rewards_are_equal(rewards: list[float], kept: bool) -> None:
    assert drop_uniform_rewards([sample(r, "a", str(i)) for i, r in enumerate(rewards)]) is kept


def test_dynamic_filter_compares_episodes_not_turns() -> None:
    def episode(name: str, rewards: list[float]) -> list[Trajectory]:
        return [sample(r, "a", name, turn) for turn, r in enumerate(rewards)]

    assert drop_uniform_rewards(episode("0", [0.5, 1.0]) + episode("1", [0.5, 1.0])) is False
    assert drop_uniform_rewards(episode("0", [0.5, 1.0]) + episode("1", [0.5, 0.0])) is True
