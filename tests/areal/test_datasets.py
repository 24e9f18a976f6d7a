"""Datasets: every kind of path, disjoint splits, and errors that name what is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from areal.datasets import DatasetError, load
from areal.datasets.tasks import SPLITS, UNSEEDED
from areal.rewards.functions import import_function

SPELL = "reasoning_gym/spell_backward"


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def score(dataset, row, completion):
    return import_function(dataset.reward_fn)("p", completion, [], [], **row)


def test_a_task_gives_rows_with_its_own_reward():
    dataset = load(SPELL, "train", dataset_kwargs={"size": 20, "min_word_len": 4, "max_word_len": 6})
    assert len(dataset) == 20 and dataset.reward_fn == "areal.rewards.reasoning_gym.reward"
    assert len({row["id"] for row in dataset}) == 20
    for row in dataset:
        assert json.loads(json.dumps(row)) == row
        (message,) = row["messages"]
        word = message["content"].rpartition(" ")[2]
        assert 4 <= len(word) <= 6 and row["answer"] == word[::-1]
        assert score(dataset, row, word[::-1]) == 1.0
        assert score(dataset, row, f"thinking</think> It is <answer>{word[::-1]}</answer>.") == 1.0
        assert score(dataset, row, "") == 0.0
    with_system = load(SPELL, "train", dataset_kwargs={"size": 1, "system_prompt": "Be brief."})
    assert with_system[0]["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("task", ["spell_backward", "coin_flip", "chain_sum"])
def test_splits_of_a_task_share_no_question_whatever_their_parameters(task):
    sizes = {"spell_backward": 800, "coin_flip": 20, "chain_sum": 400}
    questions: dict[str, set[str]] = {}
    for index, split in enumerate(SPLITS):
        for seed in (index, 7):
            rows = load(f"reasoning-gym:{task}", split, dataset_kwargs={"size": sizes[task], "seed": seed})
            texts = [row["messages"][-1]["content"].casefold() for row in rows]
            assert len({row["id"] for row in rows}) == sizes[task]
            questions.setdefault(split, set()).update(texts)
    for first in SPLITS:
        for second in SPLITS:
            assert first == second or not questions[first] & questions[second]


def test_the_quickstart_task_has_enough_questions():
    for split, size in {"train": 4000, "warm_start": 2500, "test": 1000}.items():
        rows = load(SPELL, split, dataset_kwargs={"size": size, "min_word_len": 4, "max_word_len": 6})
        assert len({row["messages"][0]["content"].casefold() for row in rows}) > 0.98 * size


def test_rows_are_the_same_in_every_load_and_grow_at_the_end():
    small = load(SPELL, "test", dataset_kwargs={"size": 10, "seed": 3})
    large = load(SPELL, "test", dataset_kwargs={"size": 50, "seed": 3})
    assert large[:10] == small.rows
    assert load(SPELL, "test", dataset_kwargs={"size": 10, "seed": 4}).rows != small.rows


@pytest.mark.parametrize(
    ("path", "split", "options", "words"),
    [
        ("reasoning_gym/spell_backwards", "train", {}, "did you mean 'spell_backward'?"),
        (SPELL, "validation", {}, "has the splits train, warm_start, test"),
        (SPELL, "train", {"min_word_length": 3}, "dataset_kwargs.min_word_length.*did you mean 'min_word_len'?"),
        (SPELL, "train", {"min_word_len": 9, "max_word_len": 3}, "max_word_len must be >= min_word_len"),
        (SPELL, "train", {"size": 0}, r"dataset_kwargs\.size = 0: must be a whole number above 0"),
        (SPELL, "train", {"seed": "one"}, r"dataset_kwargs\.seed = 'one'"),
        ("reasoning_gym/coin_flip", "test", {"size": 10_000}, "coin_flip .* has [0-9]+ distinct questions"),
        ("no such dataset", "train", {}, "is no file, no folder and no hub id"),
        ("missing.jsonl", "train", {}, "is no file, no folder and no hub id"),
    ],
)
def test_wrong_requests_are_named(path, split, options, words):
    with pytest.raises(DatasetError, match=words):
        load(path, split, dataset_kwargs=options)


def test_jsonl_with_messages_prompt_or_question(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    file = write_lines(
        tmp_path / "data.jsonl",
        {"messages": messages, "answer": 3, "level": 2},
        {"prompt": "Say a.", "answer": "a"},
        {"question": "b?", "id": "mine"},
    )
    dataset = load(str(file))
    assert dataset.reward_fn is None
    assert dataset.rows == [
        {"id": "data.jsonl/train:0", "messages": messages, "answer": "3", "level": 2},
        {"id": "data.jsonl/train:1", "messages": [{"role": "user", "content": "Say a."}], "answer": "a"},
        {"id": "data.jsonl/train:mine", "messages": [{"role": "user", "content": "b?"}], "question": "b?"},
    ]
    options = {"size": 2, "system_prompt": "S"}
    assert [row["messages"][0]["content"] for row in load(str(file), dataset_kwargs=options)] == ["S", "S"]


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        (
            [{"prompt": "a"}, {"text": "b"}],
            {},
            "line 2: none of the columns messages, prompt and question; it has text",
        ),
        ([{"prompt": "a"}], {"prompt_column": "task"}, "line 1: no column 'task'; it has prompt"),
        ([{"prompt": "a"}], {"answer_column": "gold"}, "line 1: no column 'gold'; it has prompt"),
        ([{"prompt": "a"}, {"prompt": 3}], {}, "line 2, column 'prompt' holds 3"),
        ([{"messages": []}], {}, r"line 1, column 'messages' holds \[\]"),
        ([{"prompt": "a"}, ["b"]], {}, "line 2 holds a list; a row is a JSON object"),
        ([{"question": "a", "completion": "b"}], {}, "column 'completion' has the name of an argument"),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}], {}, "line 1 and line 2 share the id 1"),
        ([], {}, "has no rows"),
        ([{"prompt": "a"}], {"prompt_colum": "x"}, "did you mean 'prompt_column'?"),
    ],
)
def test_a_bad_row_is_named_with_its_file_line_and_column(tmp_path, lines, options, words):
    file = write_lines(tmp_path / "rows.jsonl", *lines)
    with pytest.raises(DatasetError, match=words) as caught:
        load(str(file), dataset_kwargs=options)
    assert "rows.jsonl" in str(caught.value)


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(DatasetError, match=r"rows\.jsonl, line 3 is not JSON"):
        load(str(tmp_path / "rows.jsonl"))


def test_gsm8k_from_a_local_folder(tmp_path):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    write_lines(folder / "test.jsonl", {"question": "2 + 2?", "answer": "2 and 2 make <<2+2=4>>4.\n#### 4"})
    dataset = load(str(folder), "test")
    (row,) = dataset
    assert row["id"] == "gsm8k/test:0"
    assert row["messages"][0]["content"] == "2 + 2?\nPlease put your final answer within \\boxed{}."
    assert score(dataset, row, "So \\boxed{4}.") == 1.0 and score(dataset, row, "So \\boxed{5}.") == 0.0
    with pytest.raises(DatasetError, match=r"has no train\.jsonl.*splits: \['test'\]"):
        load(str(folder), "train")


def test_parquet_and_saved_folders_and_a_hub_dataset_give_the_same_rows(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(3)]
    table = datasets.Dataset.from_list(rows)
    (tmp_path / "parquet").mkdir()
    table.to_parquet(tmp_path / "parquet" / "train-00000-of-00001.parquet")
    table.save_to_disk(tmp_path / "flat")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    write_lines(tmp_path / "lines.jsonl", *rows)
    expected = [(f"q{n}", f"a{n}") for n in range(3)]
    for name in ("parquet", "flat", "splits", "lines.jsonl", "parquet/train-00000-of-00001.parquet"):
        loaded = load(str(tmp_path / name), "train")
        assert [(row["messages"][0]["content"], row["answer"]) for row in loaded] == expected, name
    with pytest.raises(DatasetError, match="no split 'test'; it has train"):
        load(str(tmp_path / "splits"), "test")

    # the path through datasets.load_dataset: it takes a relative folder for a hub id of the same form
    shutil.copytree(tmp_path / "parquet", tmp_path / "org" / "name" / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from areal.datasets import tables

    source, records = tables._open_hub("org/name", "train", None)
    assert source == "org/name"
    assert [(place, record["question"]) for place, record in records] == [(f"row {n}", f"q{n}") for n in range(3)]


def test_an_unreachable_hub_dataset_says_how_to_go_on(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetError, match=r"'nobody/nothing', split 'train' cannot be loaded .*train\.jsonl"):
        load("nobody/nothing")


@pytest.mark.slow
def test_every_task_loads_scores_its_reference_and_bears_junk():
    import warnings

    from reasoning_gym.factory import DATASETS

    warnings.simplefilter("ignore")
    junk = (
        "",
        "junk",
        "12 apples",
        "[1,2]",
        '[{"a": 1}]',
        "{}",
        "1e400",
        "9" * 5000,
        "½",
        "1/0",
        "null",
        "2 × x",
        "(" * 50,
    )
    imperfect = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # no reference answer
    for task in sorted(set(DATASETS) - {"composite"}):  # a mixture of tasks has no questions of its own
        dataset = load(f"reasoning_gym/{task}", "train", dataset_kwargs={"size": 3})
        for row in json.loads(json.dumps(dataset.rows)):
            if task not in imperfect:
                assert score(dataset, row, row["answer"]) == 1.0, task
            for text in junk:
                assert 0.0 <= score(dataset, row, text) <= 1.0, (task, text)


@pytest.mark.slow
def test_rows_of_every_task_are_the_same_in_every_process():
    import os
    import subprocess
    import sys

    code = (
        "import hashlib, json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
        "from areal.datasets import load\n"
        "from reasoning_gym.factory import DATASETS\n"
        "for task in sorted(set(DATASETS) - {'composite'}):\n"
        "    rows = load(f'reasoning_gym/{task}', 'train', dataset_kwargs={'size': 3}).rows\n"
        "    print('digest', task, hashlib.sha256(json.dumps(rows).encode()).hexdigest())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, json.dumps(sys.path)],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    ]
    digests = [{line for line in output.splitlines() if line.startswith("digest")} for output in outputs]
    assert len(digests[0]) > 100 and digests[0] == digests[1]


@pytest.mark.parametrize("task", sorted(UNSEEDED - {"knight_swap", "word_ladder"}))
def test_a_task_that_depends_on_more_than_its_seed_is_drawn_under_fixed_conditions(task):
    options = {"size": 4, "seed": 2}
    first = load(f"reasoning_gym/{task}", "train", dataset_kwargs=options)
    assert first.rows == load(f"reasoning_gym/{task}", "train", dataset_kwargs=options).rows
    assert score(first, first[0], first[0]["answer"]) == 1.0
