"""reasoning-gym tasks as datasets: generated, without duplicates, in splits that share no question."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from areal.datasets.dataset import Dataset, DatasetError, Row, as_messages, check_keys, nearest

REWARD = "areal.rewards.reasoning_gym.reward"
SPLITS = {"train": range(6), "warm_start": range(6, 8), "test": range(8, 10)}
"""Tenths of all questions, by a hash of the question, that belong to each split."""
UNSEEDED = frozenset(
    {"isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Tasks whose entries depend on more than their seed: Python's string hashing, or its global random generator."""

PATIENCE = 1000
"""Repeated questions in a row, beyond ten times those seen, after which a task is taken to have no more."""


def load_task(task: str, split: str, options: Mapping[str, Any]) -> Dataset:
    """``size`` rows of a task with columns ``id``, ``messages``, ``answer``, ``task``, ``task_config`` and ``entry``.

    Questions are drawn in the order of the seed, repeated ones are dropped, and each belongs to the one split that a
    hash of its text (without regard to case) chooses. So two splits never share a question, whatever their sizes,
    seeds and parameters: held-out prompts, training prompts and warm-start answers are disjoint by construction.

    Args:
        task: any name of reasoning-gym.
        split: ``train`` (six tenths of all questions), ``warm_start`` (two) or ``test`` (two).
        options: ``size`` (rows of this split, 500), ``seed`` (1), ``system_prompt``, and the task's own parameters.

    Raises:
        DatasetError: an unknown task, split or key; parameters that the task refuses; fewer questions than ``size``.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise DatasetError(f"reasoning-gym has no task {task!r}; {nearest(task, DATASETS)}")
    if split not in SPLITS:
        raise DatasetError(f"split {split!r}: a reasoning-gym task has the splits {', '.join(SPLITS)}")
    own = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"size", "seed"}
    check_keys(options, own | {"size", "seed", "system_prompt"}, f"task {task}")
    size, seed = options.get("size", 500), options.get("seed", 1)
    for key, value in (("size", size), ("seed", seed)):
        if not isinstance(value, int) or isinstance(value, bool) or value < (key == "size"):
            raise DatasetError(f"dataset_kwargs.{key} = {value!r}: must be a whole number above {-(key == 'seed')}")
    config = {key: value for key, value in options.items() if key in own}
    try:
        reasoning_gym.create_dataset(task, size=1, seed=seed, **config)
    except (AssertionError, ValueError, TypeError) as error:
        raise DatasetError(f"task {task} refuses dataset_kwargs {config}: {error}") from error
    entries = _draw_elsewhere(task, split, size, seed, config) if task in UNSEEDED else None
    return Dataset(
        [
            {
                "id": f"reasoning_gym/{task}:{_digest(entry['question'])[:16]}",
                "messages": as_messages(entry["question"], options.get("system_prompt")),
                "answer": entry["answer"] if isinstance(entry["answer"], str) else "",
                "task": task,
                "task_config": config,
                "entry": entry,
            }
            for entry in entries or draw(task, split, size, seed, config)
        ],
        REWARD,
    )


def draw(task: str, split: str, size: int, seed: int, config: Mapping[str, Any]) -> list[Row]:
    """``size`` packed entries of a split with distinct questions, in the order of the seed."""
    import reasoning_gym

    from areal.rewards.reasoning_gym import pack

    count = 8 * size
    while True:
        source = reasoning_gym.create_dataset(task, size=count, seed=seed, **config)
        chosen: list[Row] = []
        seen: set[str] = set()
        repeated = 0
        for index in range(count):
            entry = source[index]
            digest = _digest(entry["question"])
            repeated = repeated + 1 if digest in seen else 0
            if repeated > PATIENCE + 10 * len(seen):
                raise DatasetError(
                    f"dataset_kwargs.size = {size}: task {task} with parameters {dict(config)} has {len(chosen)} "
                    f"distinct questions for split {split!r}; ask for fewer or widen its parameters"
                )
            if repeated == 0:
                seen.add(digest)
                if _split_of(entry["question"]) == split:
                    chosen.append(pack(entry))
            if len(chosen) == size:
                return chosen
        count *= 4


def _draw_elsewhere(task: str, split: str, size: int, seed: int, config: Mapping[str, Any]) -> list[Row]:
    """``draw`` in a process whose hashing and random generator are fixed, so that a resumed run sees the same rows."""
    request = json.dumps([task, split, size, seed, config])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CHILD, json.dumps(sys.path), request],
        env=os.environ | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise DatasetError(f"drawing questions of task {task} failed:\n{done.stderr}")
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


_CHILD = (
    "import sys, json, random; sys.path[:] = json.loads(sys.argv[1]); random.seed(0); "
    "from areal.datasets.tasks import draw; "
    "print('\\n' + json.dumps(draw(*json.loads(sys.argv[2]))))"
)


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()


def _split_of(question: str) -> str:
    tenth = int(_digest(question.casefold())[:8], 16) % 10
    return next(split for split, tenths in SPLITS.items() if tenth in tenths)
