"""Train with a workflow and a reward of one's own.

python examples/custom_workflow/train.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal import Trainer
from areal.config import load_config
from areal.rollout.trajectory import Trajectory

RECIPE = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """1 for the right word. ``row`` holds the columns of the dataset."""
    return float(completion == row["answer"])


class BestOfTwo:
    """Answers twice and trains the better answer."""

    def __init__(self, reward_fn: Any) -> None:
        self.reward_fn = reward_fn

    async def run(self, data: dict[str, Any], **kwargs: Any) -> Trajectory:
        episode = kwargs["episode"]
        prompt_ids = episode.render(data["messages"])
        answers = []
        for _ in range(2):
            answer = await episode.generate(prompt_ids)
            text = episode.text(answer.token_ids)
            score = await episode.reward(
                self.reward_fn, data["messages"][-1]["content"], text, prompt_ids, answer.token_ids, **data
            )
            answers.append((score, answer))
        score, answer = max(answers, key=lambda scored: scored[0])
        return episode.trajectory(prompt_ids, answer, score)


if __name__ == "__main__":
    config = load_config(RECIPE, ["experiment_name=best_of_two", "total_train_steps=20"])
    print(Trainer(config, workflow=BestOfTwo(reward)).train().summary)
