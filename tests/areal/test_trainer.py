"""Whole runs in this process: what is trained, how old it is, what is on disk, and what goes wrong by name."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import recipe, write_model
from transformers import AutoModelForCausalLM

import archon
from areal import Trainer
from areal.config import ConfigError
from areal.metrics.logger import read_metrics
from areal.rollout.errors import ExecutorError, WorkflowFailure
from areal.rollout.journal import Journal, JournalError
from areal.rollout.recovery import audit
from areal.rollout.trajectory import Trajectory, pack
from areal.run_identity import config_digest
from areal.workflows import RLVRWorkflow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def share_of_vowels(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """Never uniform for long, and cheap."""
    return sum(letter in "aeiou" for letter in completion) / max(1, len(completion))


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run_dir / "metrics.jsonl"))


class Recorder(RLVRWorkflow):
    """Keeps what it returned; waits as told before each episode."""

    def __init__(self, delay: Any = lambda order: 0.0, **options: Any) -> None:
        super().__init__(reward_fn=share_of_vowels, **options)
        self.delay = delay
        self.trajectories: list[Trajectory] = []

    async def run(self, data: dict[str, Any], **kwargs: Any) -> Trajectory:
        trajectory = await super().run(data, **kwargs)
        if not kwargs["episode"].is_eval:
            await asyncio.sleep(self.delay(kwargs["episode"].order))
            self.trajectories.append(trajectory)
        return trajectory


def finished_journal(trainer: Trainer) -> dict[str, int]:
    """Counts by state, after a full audit."""
    objects = trainer._objects
    digest = config_digest(trainer.config, objects["workflow"], objects["reward_fn"])
    journal = Journal.open(trainer.config.run_dir, digest)
    try:
        audit(journal, finished=True)
        return journal.counts()
    finally:
        journal.close()


def test_a_run_from_a_dict_leaves_everything_it_promises(model: Path, tmp_path: Path) -> None:
    trainer = Trainer(recipe(model, tmp_path, saver__freq_steps=2), reward_fn=share_of_vowels)
    result = trainer.train()
    assert result.steps == 4 and result.prompts == 8
    assert result.summary.startswith("held-out reward: 0.") and "(8 prompts, 4 steps, " in result.summary
    run = tmp_path / "test" / "trial0"
    for name in ("config.yaml", "journal.db", "metrics.jsonl", "plots/reward.png", "checkpoints/step_4", "hf/step_2"):
        assert (run / name).exists(), name
    assert any((run / "tensorboard").iterdir())
    found = rows(run)
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4] == [row["version"] for row in found]
    assert {row["staleness/max"] for row in found[1:]} == {0.0}
    assert found[0]["eval/reward"] == result.before and found[-1]["eval/reward"] == result.after
    assert finished_journal(trainer)["prompt/trained"] == 16
    exported = AutoModelForCausalLM.from_pretrained(run / "hf" / "step_4", dtype="auto")
    engine = archon.Engine.from_pretrained(run / "hf" / "step_4", dtype="float32")
    assert torch.equal(exported.lm_head.weight, dict(engine.model.named_parameters())["lm_head.weight"])


@pytest.mark.parametrize("mode", ["memory", "disk"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_logprobs_are_the_trainers_at_equal_versions(
    model: Path, tmp_path: Path, mode: str, temperature: float
) -> None:
    """In fp32, what the engine sampled with is what the trainer recomputes."""
    workflow = Recorder()
    changes = {"actor__weight_update_mode": mode, "gconfig__temperature": temperature, "saver__freq_steps": 1}
    trainer = Trainer(recipe(model, tmp_path, total_train_steps=3, **changes), workflow=workflow)
    run = trainer.train().run_dir
    by_version: dict[int, list[Trajectory]] = {}
    for trajectory in workflow.trajectories:
        by_version.setdefault(trajectory.oldest_version, []).append(trajectory)
    assert sorted(by_version) == [0, 1, 2]
    for version in (1, 2):
        engine = archon.Engine.from_pretrained(run / "hf" / f"step_{version}", dtype="float32", optimizer=None)
        batch = pack(by_version[version])
        recomputed = engine.forward(batch).logprobs
        assert (recomputed - batch["behaviour_logprobs"]).abs().max() <= 1e-5
        assert batch.loss_mask.sum() > 16


def test_zero_is_synchronous_and_eta_is_a_strict_bound(model: Path, tmp_path: Path) -> None:
    for eta in (0, 2):
        workflow = Recorder(delay=lambda order: 0.4 if order == (2, 1) else 0.02)
        config = recipe(model, tmp_path / str(eta), total_train_steps=6, rollout__max_head_offpolicyness=eta)
        trainer = Trainer(config, workflow=workflow)
        found = rows(trainer.train().run_dir)[1:]
        assert max(row["staleness/max"] for row in found) <= eta
        assert (max(row["staleness/max"] for row in found) > 0) == (eta > 0)
        finished_journal(trainer)


def test_a_second_run_of_the_same_command_changes_nothing(model: Path, tmp_path: Path) -> None:
    config = recipe(model, tmp_path, total_train_steps=2)
    first = Trainer(config, reward_fn=share_of_vowels).train()
    again = Trainer(config, reward_fn=share_of_vowels).train()
    assert (again.before, again.after, again.steps) == (first.before, first.after, 2)
    assert len(rows(first.run_dir)) == 3
    with pytest.raises(ConfigError, match="recover.mode"):
        Trainer({**config, "recover": {"mode": "off"}}, reward_fn=share_of_vowels).train()
    with pytest.raises(ConfigError, match="^seed: .* another trial_name"):
        Trainer({**config, "seed": 2}, reward_fn=share_of_vowels).train()


def test_running_out_of_prompts_trains_a_last_smaller_batch(model: Path, tmp_path: Path) -> None:
    config = recipe(model, tmp_path, total_train_steps=None, train_dataset__dataset_kwargs={"size": 6})
    trainer = Trainer(config, reward_fn=share_of_vowels)
    result = trainer.train()
    assert result.steps == 2
    assert [row["batch/groups"] for row in rows(result.run_dir)[1:]] == [4, 2]
    assert finished_journal(trainer)["prompt/trained"] == 6


def keep_every_third(trajectories: list[Trajectory]) -> bool:
    return int(trajectories[0].prompt_id[-8:], 16) % 3 == 0


def test_filtered_groups_are_replaced_and_counted(model: Path, tmp_path: Path) -> None:
    config = recipe(
        model,
        tmp_path,
        total_train_steps=2,
        dynamic_filter_fn="test_trainer.keep_every_third",
        rollout__max_head_offpolicyness=1,
    )
    trainer = Trainer(config, reward_fn=share_of_vowels)
    result = trainer.train()
    counts = finished_journal(trainer)
    assert result.steps == 2 and counts["prompt/trained"] == 8
    assert counts["prompt/dropped/filtered"] >= 1
    assert [row["batch/groups"] for row in rows(result.run_dir)[1:]] == [4, 4]


def test_mini_batches_and_every_proximal_method_train(model: Path, tmp_path: Path) -> None:
    rejection = {"metric": "ratio", "lower": 0.5, "upper": 5.0}
    for method, updates in (("recompute", 2), ("loglinear", 2), ("reuse", 1)):
        config = recipe(
            model,
            tmp_path / method,
            total_train_steps=2,
            actor__ppo_n_minibatches=updates,
            actor__prox_logp_method=method,
            actor__rejection_sampling=rejection,
            rollout__max_head_offpolicyness=1,
        )
        last = rows(Trainer(config, reward_fn=share_of_vowels).train().run_dir)[-1]
        assert math.isfinite(last["loss"]) and last["grad_norm"] > 0 and last["skipped_updates"] == 0
        assert last["importance_weight/mean"] == pytest.approx(1.0, abs=0.2)


# Wrong input: one clear message or a counted, named rejection; nothing hangs


def raises_now_and_then(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    if int(data["id"][-4:], 16) % 4 == 0:
        raise ValueError("cannot judge this")
    return share_of_vowels(prompt, completion, prompt_ids, completion_ids)


def hangs_now_and_then(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    if int(data["id"][-4:], 16) % 8 == 0:
        time.sleep(3600)
    return share_of_vowels(prompt, completion, prompt_ids, completion_ids)


@pytest.mark.parametrize("reward", [raises_now_and_then, hangs_now_and_then])
def test_a_reward_that_raises_or_hangs_costs_its_prompt_and_nothing_else(
    model: Path, tmp_path: Path, reward: Any
) -> None:
    config = recipe(
        model,
        tmp_path,
        total_train_steps=3,
        rollout__max_attempts=1,
        rollout__reward_timeout=0.5,
        gconfig__n_samples=2,
        valid_dataset=None,
        evaluator={"eval_before_train": False},
    )
    trainer = Trainer(config, reward_fn=reward)
    result = trainer.train()
    counts = finished_journal(trainer)
    reason = "error:RewardError" if reward is raises_now_and_then else "error:RewardTimeout"
    assert result.steps == 3 and counts["prompt/trained"] == 12
    assert counts[f"prompt/dropped/{reason}"] >= 1


def always_raises(*arguments: Any, **data: Any) -> float:
    raise ZeroDivisionError("the reward of nothing")


def test_a_workflow_that_always_fails_stops_the_run_with_its_traceback(model: Path, tmp_path: Path) -> None:
    class Broken:
        async def run(self, data: dict[str, Any], **kwargs: Any) -> None:
            raise LookupError("the workflow is broken here")

    quiet = {"evaluator": {"eval_before_train": False}}
    began = time.monotonic()
    with pytest.raises(WorkflowFailure, match="the workflow is broken here") as failure:
        Trainer(recipe(model, tmp_path / "a", **quiet), workflow=Broken()).train()
    assert "in run" in str(failure.value) and "LookupError" in str(failure.value)
    with pytest.raises(WorkflowFailure, match="the reward of nothing"):
        Trainer(recipe(model, tmp_path / "b", **quiet), reward_fn=always_raises).train()
    assert time.monotonic() - began < 60


def test_rows_without_the_asked_column_and_long_prompts_are_named(model: Path, tmp_path: Path) -> None:
    message = [{"role": "user", "content": "abc"}]
    good = [{"id": str(i), "messages": message} for i in range(9)]
    lacking = {"id": "lacking", "answer": "cba"}
    long = {"id": "long", "messages": [{"role": "user", "content": "a" * 300}]}
    config = recipe(
        model,
        tmp_path,
        total_train_steps=None,
        valid_dataset=None,
        evaluator={"eval_before_train": False},
    )
    trainer = Trainer(config, reward_fn=share_of_vowels, train_rows=[*good, lacking, long])
    result = trainer.train()
    counts = finished_journal(trainer)
    assert result.steps == 3 and counts["prompt/trained"] == 9
    assert counts["prompt/dropped/prompt_too_long"] == 1
    assert counts["prompt/dropped/missing_column"] == 1


def test_a_folder_that_is_no_model_is_bad_configuration(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"actor.path.*no config.json"):
        Trainer(recipe(tmp_path / "empty", tmp_path)).train()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text(json.dumps({"model_type": "perceiver"}))
    with pytest.raises(ConfigError, match=r"actor.path.*perceiver"):
        Trainer(recipe(tmp_path / "strange", tmp_path)).train()
    with pytest.raises(ConfigError, match="neither model.safetensors"):
        Trainer(recipe(model, tmp_path, actor__init_from_scratch=False)).train()


def test_a_dead_engine_ends_the_run_at_once(model: Path, tmp_path: Path) -> None:
    from areal.inference.backend import BackendError

    class Killer(RLVRWorkflow):
        async def run(self, data: dict[str, Any], **kwargs: Any) -> Trajectory:
            raise BackendError("the generation thread failed")

    began = time.monotonic()
    with pytest.raises(ExecutorError, match="the generation thread failed"):
        Trainer(
            recipe(model, tmp_path, evaluator={"eval_before_train": False}), workflow=Killer(share_of_vowels)
        ).train()
    assert time.monotonic() - began < 30


# Resuming


def test_a_final_measurement_that_was_cut_off_is_made_up_for(model: Path, tmp_path: Path) -> None:
    config = recipe(model, tmp_path, total_train_steps=2)
    first = Trainer(config, reward_fn=share_of_vowels).train()
    path = first.run_dir / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    del found[-1]["eval/reward"]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    again = Trainer(config, reward_fn=share_of_vowels).train()
    assert again.before == first.before and again.after is not None
    assert rows(first.run_dir)[-1]["eval/reward"] == again.after


def test_a_checkpoint_that_is_not_the_recorded_one_is_refused(model: Path, tmp_path: Path) -> None:
    config = recipe(model, tmp_path, total_train_steps=2)
    run = Trainer(config, reward_fn=share_of_vowels).train().run_dir
    with sqlite3.connect(run / "journal.db") as db:
        db.execute("UPDATE checkpoint SET digest = 'deadbeef'")
    with pytest.raises(JournalError, match="the folder was changed"):
        Trainer(config, reward_fn=share_of_vowels).train()


def test_what_the_configuration_names_is_looked_at_first(model: Path, tmp_path: Path) -> None:
    wrong = {
        "reward_fn": ("areal.rewards.gsm8k.rewrd", "did you mean areal.rewards.gsm8k.reward"),
        "workflow": ("areal.workflows.Nope", "has no 'Nope'"),
        "workflow_kwargs": ({"turns": 3}, "workflow_kwargs"),
        "gconfig__stop": (["abc def"], "only a single one can end"),
        "rollout__max_model_len": (100_000, "rollout.max_model_len"),
    }
    for number, (key, (value, message)) in enumerate(wrong.items()):
        with pytest.raises(ConfigError, match=message):
            Trainer(recipe(model, tmp_path / str(number), **{key: value})).train()
