"""RLVRWorkflow: one answer, one verifiable reward."""

from __future__ import annotations

from typing import Any

from areal.rewards.functions import RewardFunction
from areal.rollout.trajectory import Trajectory
from areal.rollout.workflow import Episode


class RLVRWorkflow:
    """Answers a row's ``messages`` once and scores the answer.

    Args:
        reward_fn: ``(prompt, completion, prompt_ids, completion_ids, **row) -> float``, as a function or import path.
    """

    def __init__(self, reward_fn: RewardFunction | str) -> None:
        self.reward_fn = reward_fn

    async def run(self, data: dict[str, Any], **kwargs: Any) -> Trajectory:
        episode: Episode = kwargs["episode"]
        prompt_ids = episode.render(data["messages"])
        generation = await episode.generate(prompt_ids)
        reward = await episode.reward(
            self.reward_fn,
            episode.tokenizer.decode(prompt_ids),
            episode.text(generation.token_ids),
            prompt_ids,
            generation.token_ids,
            **data,
        )
        return episode.trajectory(prompt_ids, generation, reward)
