"""A run small enough for a test: a tiny model on the quickstart's tokenizer, spelling words backward."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[1] / "configs" / "models" / "tiny_qwen3_moe"
TASK = {"min_word_len": 3, "max_word_len": 5}


def write_model(folder: Path) -> Path:
    """The quickstart's folder with a smaller model in it."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "moe_intermediate_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def recipe(model: Path, fileroot: Path, **changes: Any) -> dict[str, Any]:
    """Four synchronous steps of 4 prompts x 4 samples in fp32; ``changes`` are dotted keys with ``__`` for the dot."""
    tree: dict[str, Any] = {
        "experiment_name": "test",
        "total_train_steps": 4,
        "cluster": {"fileroot": str(fileroot)},
        "actor": {
            "path": str(model),
            "init_from_scratch": True,
            "dtype": "float32",
            "optimizer": {"lr": 1e-3},
        },
        "gconfig": {"n_samples": 4, "max_new_tokens": 6},
        "rollout": {"num_threads": 1, "reward_workers": 1},
        "train_dataset": {
            "path": "reasoning_gym/spell_backward",
            "batch_size": 4,
            "dataset_kwargs": {"size": 32, **TASK},
        },
        "valid_dataset": {"path": "reasoning_gym/spell_backward", "dataset_kwargs": {"size": 8, **TASK}},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return tree
