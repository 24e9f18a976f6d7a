"""load: which loader a path asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from areal.datasets.dataset import Dataset, DatasetError

__all__ = ["Dataset", "DatasetError", "load"]


def load(path: str, split: str = "train", *, dataset_kwargs: Mapping[str, Any] | None = None) -> Dataset:
    """The rows of one split of a dataset.

    Args:
        path: ``reasoning_gym/<task>`` (or ``:``); a ``.jsonl`` or ``.parquet`` file; a folder with ``<split>.jsonl`` or
            ``<split>*.parquet``, or as ``datasets`` saves one; or a hub id such as ``openai/gsm8k``.
        split: ``train``, ``test``, …; for a task ``train``, ``test`` or ``warm_start``, which never share a question.
        dataset_kwargs: what the loader takes beyond: see ``areal.datasets.tasks.load_task`` and
            ``areal.datasets.tables.load_table``.

    Raises:
        DatasetError: no such dataset, split, task, key or column, named with the nearest that exists.
    """
    options = dict(dataset_kwargs or {})
    if match := re.fullmatch(r"reasoning[_-]gym[/:](.+)", path):
        from areal.datasets.tasks import load_task

        return load_task(match[1], split, options)
    from areal.datasets.tables import load_table

    return load_table(path, split, options)
