"""Ids of rows never collide: not in a dataset, not between tasks, splits or files."""

from __future__ import annotations

import json

from areal.datasets import load


def test_ids_of_different_environments_do_not_collide(tmp_path):
    for name in ("algebra", "geometry"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{n}?", "id": n}) + "\n" for n in range(9))
        )
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n' * 9)
    loaded = [
        load(str(tmp_path / "algebra.jsonl")),
        load(str(tmp_path / "geometry.jsonl")),
        load(str(tmp_path / "gsm8k"), "train"),
        load(str(tmp_path / "gsm8k"), "test"),
        *(
            load(f"reasoning_gym/{task}", split, dataset_kwargs={"size": 9})
            for task in ("spell_backward", "chain_sum")
            for split in ("train", "warm_start", "test")
        ),
    ]
    ids = [row["id"] for dataset in loaded for row in dataset]
    assert len(set(ids)) == len(ids) == 9 * len(loaded)
    assert all(isinstance(name, str) for name in ids)
