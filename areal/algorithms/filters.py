"""Filters for ``dynamic_filter_fn``: whether the trajectories of one prompt group are worth training on."""

from __future__ import annotations

from collections.abc import Sequence

from areal.rollout.trajectory import Trajectory


def drop_uniform_rewards(trajectories: Sequence[Trajectory]) -> bool:
    """Keep a group iff the rewards of its episodes differ: equal ones have no advantage (DAPO, arXiv 2503.14476).

    An episode of several turns is compared by the rewards of all its turns, in order.
    """
    episodes: dict[str, list[tuple[int, float]]] = {}
    for trajectory in trajectories:
        episodes.setdefault(trajectory.episode_id, []).append((trajectory.turn, trajectory.reward))
    return len({tuple(sorted(rewards)) for rewards in episodes.values()}) > 1
