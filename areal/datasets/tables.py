"""Files, folders and hub datasets: tables whose columns become rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal.datasets.dataset import RESERVED, Dataset, DatasetError, Row, as_messages, check_keys

PROMPT_COLUMNS = ("messages", "prompt", "question")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
GSM8K_REWARD = "areal.rewards.gsm8k.reward"
GSM8K_SUFFIX = "\nPlease put your final answer within \\boxed{}."
OPTIONS = ("name", "prompt_column", "answer_column", "suffix", "system_prompt", "size")


def load_table(path: str, split: str, options: Mapping[str, Any]) -> Dataset:
    """Rows of a table, one per line or record, with its further columns kept.

    A path that names GSM8K gets its reward, and its prompts ask for a boxed answer.

    Args:
        path: see ``areal.datasets.load``.
        split: of a folder or hub dataset; a file is one split whatever this says.
        options: ``prompt_column`` (else the first of ``messages``, ``prompt``, ``question`` in the row), holding
            text or messages; ``answer_column`` (else ``answer``, where there is one); ``suffix``, added to a text
            prompt; ``system_prompt``; ``size``, of a leading part; ``name``, the hub dataset's configuration.

    Raises:
        DatasetError: no such file, split or key; a line that is no JSON object; a row without the asked column.
    """
    check_keys(options, OPTIONS, f"dataset {path}")
    is_gsm8k = "gsm8k" in path.lower()
    source, records = _open(path, split, options.get("name", "main" if is_gsm8k else None))
    suffix = options.get("suffix", GSM8K_SUFFIX if is_gsm8k else "")
    stem = Path(path).name if HUB_ID.fullmatch(path) is None or Path(path).exists() else path
    rows: list[Row] = []
    seen: dict[str, str] = {}
    for index, (place, record) in enumerate(records):
        if index == options.get("size"):
            break
        row = _row(record, f"{source}, {place}", options, suffix)
        row["id"] = f"{stem}/{split}:{record.get('id', index)}"
        if (first := seen.setdefault(row["id"], place)) != place:
            raise DatasetError(f"{source}: {first} and {place} share the id {record.get('id')!r}; ids are unique")
        rows.append(row)
    if not rows:
        raise DatasetError(f"{source} has no rows")
    return Dataset(rows, GSM8K_REWARD if is_gsm8k else None)


def _row(record: Mapping[str, Any], place: str, options: Mapping[str, Any], suffix: str) -> Row:
    asked = options.get("prompt_column")
    column = asked or next((name for name in PROMPT_COLUMNS if name in record), None)
    if column is None or column not in record:
        wanted = f"column {asked!r}" if asked else "none of the columns messages, prompt and question"
        raise DatasetError(
            f"{place}: {'no ' if asked else ''}{wanted}; it has {', '.join(sorted(record)) or 'nothing'}"
        )
    answer_column = options.get("answer_column")
    if answer_column is not None and answer_column not in record:
        raise DatasetError(f"{place}: no column {answer_column!r}; it has {', '.join(sorted(record))}")
    row = {name: value for name, value in record.items() if name != column or name == "question"}
    for name in RESERVED:
        if name in row:
            raise DatasetError(f"{place}: column {name!r} has the name of an argument of reward functions; rename it")
    if "answer" in row or answer_column is not None:
        answer = record[answer_column or "answer"]
        row["answer"] = answer if isinstance(answer, str) else json.dumps(answer)
    row["messages"] = _messages(record[column], f"{place}, column {column!r}", suffix, options.get("system_prompt"))
    return row


def _messages(value: Any, place: str, suffix: str, system_prompt: str | None) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return as_messages(value + suffix, system_prompt)
    is_messages = isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)
    if not is_messages or not value:
        raise DatasetError(f'{place} holds {value!r}; a prompt is text or a list of {{"role": …, "content": …}}')
    if system_prompt and value[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *value]
    return list(value)


Records = Iterator[tuple[str, dict[str, Any]]]


def _open(path: str, split: str, name: str | None) -> tuple[str, Records]:
    """What errors call the source, and its records with their places."""
    local = Path(path).expanduser()
    if local.is_file():
        return str(local), _read_file(local)
    if local.is_dir():
        return _open_folder(local, split)
    if HUB_ID.fullmatch(path) is None or path.endswith((".jsonl", ".parquet")) or path.startswith("."):
        raise DatasetError(f"dataset {path!r} is no file, no folder and no hub id such as openai/gsm8k")
    return _open_hub(path, split, name)


def _open_hub(path: str, split: str, name: str | None) -> tuple[str, Records]:
    import datasets

    try:
        table = datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise DatasetError(
            f"hub dataset {path!r}, split {split!r} cannot be loaded ({error}); with no network, download it elsewhere "
            f"and give the folder that holds {split}.jsonl"
        ) from error
    return path, _numbered(table)


def _open_folder(folder: Path, split: str) -> tuple[str, Records]:
    if (file := folder / f"{split}.jsonl").is_file():
        return str(file), _read_file(file)
    if files := sorted(folder.glob(f"**/{split}*.parquet")):
        return str(folder), _numbered(record for file in files for _, record in _read_file(file))
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        import datasets

        saved = datasets.load_from_disk(str(folder))
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise DatasetError(f"{folder} has no split {split!r}; it has {', '.join(saved)}")
            saved = saved[split]
        return str(folder), _numbered(saved)
    splits = sorted({file.stem for file in folder.glob("*.jsonl")})
    raise DatasetError(
        f"{folder} has no {split}.jsonl, no {split}*.parquet and is not saved by datasets; splits: {splits}"
    )


def _read_file(file: Path) -> Records:
    if file.suffix == ".parquet":
        import pyarrow.parquet  # type: ignore[import-untyped]

        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            yield from _numbered(batch.to_pylist())
        return
    if file.suffix not in (".jsonl", ".json"):
        raise DatasetError(f"{file}: a dataset file ends in .jsonl (one JSON object per line) or .parquet")
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DatasetError(f"{file}, line {number} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise DatasetError(f"{file}, line {number} holds a {type(record).__name__}; a row is a JSON object")
            yield f"line {number}", record


def _numbered(records: Iterable[dict[str, Any]]) -> Records:
    for index, record in enumerate(records):
        yield f"row {index}", dict(record)
