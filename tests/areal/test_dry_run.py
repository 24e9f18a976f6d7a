"""The plan of a run against numbers worked out by hand, and against the code that will do the work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from archon.batch import PackedBatch, micro_batches, mini_batches
from archon.models.config import ModelConfig, RopeConfig
from areal import dry_run
from areal.cli import run_app
from areal.config import load_config
from areal.inference import embedded

MODEL = ModelConfig("llama", 100, 32, 64, 2, 4, 2, 8, 4096, RopeConfig(10_000.0))


def planned(rows: int, lengths: list[int], *overrides: str, **changes: Any) -> dry_run.DryRun:
    recipe = {"experiment_name": "x", "actor": {"path": "m"}, "train_dataset": {"path": "d"}} | changes
    return dry_run.plan(load_config(recipe, list(overrides)), MODEL, rows, lengths)


def test_counts_worked_out_by_hand() -> None:
    found = planned(
        100, [10, 30],
        "train_dataset.batch_size=8", "gconfig.n_samples=4", "gconfig.max_new_tokens=70",
        "actor.ppo_n_minibatches=2", "actor.mb_spec.max_tokens_per_mb=400", "total_train_epochs=2",
    )  # fmt: skip
    assert (found.prompts, found.samples) == (8, 32)
    assert (found.steps, found.steps_per_epoch) == (25, 13)  # 200 prompts in eights; 100 prompts need a 13th step
    assert found.updates == 50
    assert found.longest_prompt == 30
    assert found.tokens == 32 * 90  # (10 + 70) and (30 + 70) in equal shares
    assert found.micro_batches == 2 * 4  # 16 sequences of at most 100 in budgets of 400
    assert found.tokens_per_micro_batch == 400


def test_limits_on_length_and_steps_hold() -> None:
    found = planned(1000, [50], "gconfig.max_tokens=60", "total_train_steps=3", "actor.mb_spec.max_tokens_per_mb=32")
    assert found.steps == 3
    assert found.tokens == found.samples * 60
    assert found.tokens_per_micro_batch == 60 and found.micro_batches == found.samples
    assert planned(3, [50]).prompts == 3, "a small dataset fills no batch"


@pytest.mark.parametrize("minibatches", [1, 3])
def test_micro_batches_are_an_upper_bound_of_the_real_ones(minibatches: int) -> None:
    prompts = [5, 40, 17, 33]
    overrides = [
        "train_dataset.batch_size=4", "gconfig.n_samples=6", "gconfig.max_new_tokens=20",
        "actor.mb_spec.max_tokens_per_mb=150", f"actor.ppo_n_minibatches={minibatches}",
    ]  # fmt: skip
    lengths = [length + 20 for length in prompts for _ in range(6)]
    batch = PackedBatch.from_sequences([{"input_ids": [0] * length} for length in lengths])
    real = sum(len(micro_batches(batch.select(part), 150)) for part in mini_batches(batch, minibatches))
    found = planned(4, prompts, *overrides)
    assert found.tokens == batch.num_tokens
    assert real <= found.micro_batches <= 2 * real


def test_cache_is_what_the_embedded_engine_takes_by_default() -> None:
    assert dry_run.DEFAULT_KV_BYTES == embedded._DEFAULT_KV_BYTES
    assert planned(10, [5]).memory.kv_cache == dry_run.DEFAULT_KV_BYTES
    sized = planned(10, [5], "rollout.kv_cache_tokens=5000", "actor.dtype=float32").memory
    assert sized.kv_cache == 5000 * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(("size", "text"), [(3 * 2**29, "1.50 GiB"), (2**20 // 2, "0.5 MiB")])
def test_sizes(size: int, text: str) -> None:
    assert dry_run.gibibytes(size) == text


TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny_qwen3_moe"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = [{"question": "reverse " + "abcdef"[: 1 + i % 6], "answer": "x"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "experiment_name": "x",
        "cluster": {"fileroot": str(tmp_path / "runs")},
        "actor": {"path": str(TINY)},
        "train_dataset": {"path": str(tmp_path / "rows.jsonl"), "batch_size": 4},
        "gconfig": {"n_samples": 2, "max_new_tokens": 8},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_real_recipe_prints_its_plan_and_writes_nothing(recipe: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(run_app, [str(recipe), "--dry-run"])
    assert result.exit_code == 0, result.output
    printed = dict(re.findall(r"^([a-z][a-z -]+?)  +([\d,.]+(?: [MG]iB)?) ", result.stdout, re.MULTILINE))
    assert printed["prompts per step"] == "4" and printed["samples per step"] == "8"
    assert printed["training steps"] == printed["optimizer updates"] == "5"
    config = json.loads((TINY / "config.json").read_text())
    assert int(printed["model parameters"].replace(",", "")) > config["vocab_size"] * config["hidden_size"]
    for name in ("parameters", "gradients", "optimizer", "compute copy", "activations", "kv cache", "together"):
        assert printed[name].endswith("iB")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor.path={tmp}", ["actor.path", "has no config.json"]),
        ("tokenizer_path={tmp}", ["tokenizer_path"]),
        ("train_dataset.path={tmp}/absent.jsonl", ["train_dataset.path", "absent.jsonl"]),
        ("train_dataset.max_length=1", ["train_dataset.max_length = 1", "longer"]),
    ],
)
def test_what_does_not_exist_is_named_with_its_key(
    recipe: Path, tmp_path: Path, override: str, parts: list[str]
) -> None:
    result = CliRunner().invoke(run_app, [str(recipe), "--dry-run", override.format(tmp=tmp_path)])
    assert result.exit_code == 2, result.output
    for part in parts:
        assert part in result.stderr
    assert "Traceback" not in result.stderr
