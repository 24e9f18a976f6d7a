"""A null that someone wrote stays a null when the resolved configuration is written and read again."""

from __future__ import annotations

from pathlib import Path

import yaml

from areal.config import load_config, resolved_yaml

RECIPE = {
    "experiment_name": "x",
    "actor": {
        "path": "model",
        "reward_norm": None,
        "rejection_sampling": {"metric": "binary_kl", "lower": None},
        "optimizer": {"lr": 1.7e-5, "warmup_steps": None},
    },
    "train_dataset": {"path": "data", "dataset_kwargs": {"seed": None, "terms": [2, 3]}},
    "warm_start": {"dataset": None},
    "recover": {"mode": "off", "freq_steps": None},
    "gconfig": {"stop": ["off", "1e-5", "null"], "n_samples": 1},
    "workflow_kwargs": {"turns": 3, "hint": None},
}


def test_explicit_null_survives_round_trip(tmp_path: Path) -> None:
    first = load_config(RECIPE)
    assert first.recover.freq_steps is None and first.actor.reward_norm is None
    written = tmp_path / "config.yaml"
    written.write_text(resolved_yaml(first))
    second = load_config(written)
    assert second == first
    assert resolved_yaml(second) == resolved_yaml(first)
    plain = yaml.safe_load(written.read_text())
    assert plain["actor"]["reward_norm"] is None
    assert plain["train_dataset"]["dataset_kwargs"] == {"seed": None, "terms": [2, 3]}
