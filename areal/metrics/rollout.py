"""What a batch of trajectories says about the rollouts it came from."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from areal.rollout.trajectory import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Rewards over episodes, lengths over trajectories and staleness over trained tokens.

    Args:
        trajectories: one batch, whole groups.
        version: of the weights at the start of the step that trains it.
    """
    rewards = {t.episode_id: t.reward for t in trajectories}
    groups: dict[str, dict[str, float]] = {}
    for t in trajectories:
        groups.setdefault(t.group_id, {})[t.episode_id] = t.reward
    ages = [age for t in trajectories for age in (version - t.versions[t.loss_mask]).tolist()]
    trained = [t.num_generated for t in trajectories]
    return {
        "reward/mean": fmean(rewards.values()),
        "reward/min": min(rewards.values()),
        "reward/max": max(rewards.values()),
        "reward/group_std": fmean(pstdev(group.values()) for group in groups.values()),
        "reward/uniform_groups": fmean(len(set(group.values())) == 1 for group in groups.values()),
        "staleness/max": float(max(ages, default=0)),
        "staleness/mean": fmean(ages) if ages else 0.0,
        "rollout/truncated_fraction": fmean(t.finish_reason == "length" for t in trajectories),
        "tokens/trained": float(sum(trained)),
        "tokens/total": float(sum(len(t.input_ids) for t in trajectories)),
        "tokens/completion_mean": fmean(trained),
        "batch/groups": float(len(groups)),
        "batch/episodes": float(len(rewards)),
    }
