"""MultiTurnWorkflow: an answer that fails is told so and may be tried again."""

from __future__ import annotations

from typing import Any

from areal.rewards.functions import RewardFunction
from areal.rollout.trajectory import Trajectory
from areal.rollout.workflow import Episode, Transcript

FEEDBACK = "Your answer is either wrong or not in the expected form. Please try to answer it again."


class MultiTurnWorkflow:
    """Answers a row's ``messages`` until the reward reaches ``success``, at most ``max_turns`` times.

    All turns are one trajectory: each goes on from the exact tokens of those before, feedback is not trained, and the
    reward is that of the last answer times ``turn_discount`` for each turn before it. A conversation that fills the
    model's context ends there.

    Args:
        reward_fn: as for RLVRWorkflow; ``prompt`` and ``prompt_ids`` are the whole conversation before the answer.
        feedback: the user's message after an answer that failed.
    """

    def __init__(
        self,
        reward_fn: RewardFunction | str,
        max_turns: int = 2,
        turn_discount: float = 0.9,
        feedback: str = FEEDBACK,
        success: float = 1.0,
    ) -> None:
        if max_turns < 1 or not 0.0 <= turn_discount <= 1.0:
            raise ValueError(f"max_turns is {max_turns} and turn_discount {turn_discount}: need >= 1 and within [0, 1]")
        self.reward_fn = reward_fn
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.feedback = feedback
        self.success = success

    async def run(self, data: dict[str, Any], **kwargs: Any) -> Trajectory:
        episode: Episode = kwargs["episode"]
        transcript = Transcript()
        transcript.give(episode.render(data["messages"]))
        for turn in range(self.max_turns):
            prompt_ids = list(transcript.input_ids)
            generation = await episode.generate(prompt_ids)
            transcript.sample(generation)
            reward = await episode.reward(
                self.reward_fn,
                episode.tokenizer.decode(prompt_ids),
                episode.text(generation.token_ids),
                prompt_ids,
                generation.token_ids,
                **data,
            )
            if reward >= self.success or turn + 1 == self.max_turns:
                break
            following = episode.render_next(transcript, self.feedback)
            if not episode.has_room(transcript.input_ids + following):
                break
            transcript.give(following)
        return episode.transcript_trajectory(transcript, reward * self.turn_discount**turn)
