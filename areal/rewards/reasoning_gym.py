"""Rewards of reasoning-gym tasks: the task's own score of an answer, taken out of the completion first."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import reasoning_gym

THOUGHTS = re.compile(r"(?s).*</think>")
ANSWER_TAG = re.compile(r"(?s)<answer>(.*?)</answer>")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def extract_answer(completion: str) -> str:
    r"""The answer in a completion: its last ``<answer>…</answer>``, else its last ``\boxed{…}``, else all of it.

    What precedes ``</think>`` is left out, as is surrounding white space.
    """
    text = THOUGHTS.sub("", completion)
    for pattern in (ANSWER_TAG, BOXED):
        if found := pattern.findall(text):
            return found[-1].strip()
    return text.strip()


def reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    task: str,
    task_config: dict[str, Any],
    entry: Any,
    **data: Any,
) -> float:
    """The task's score of the answer, in [0, 1]; many tasks give partial credit.

    Args:
        task, task_config, entry: columns of the rows that ``areal.datasets`` makes of a task.
    """
    answer = extract_answer(completion)
    well_formed = ANSWER_FORMS.get(task)
    if well_formed is not None and not well_formed(answer):
        return 0.0
    scorer = _dataset(task, json.dumps(task_config, sort_keys=True))
    return float(scorer.score_answer(answer, unpack(entry)))


def exact(*arguments: Any, **data: Any) -> float:
    """1.0 if the task gives full marks to the answer, else 0.0: its mean is an accuracy."""
    return float(reward(*arguments, **data) >= 1.0)


def pack(value: Any) -> Any:
    """An entry as JSON has it, tuples kept apart from lists (some tasks compare them).

    Raises:
        TypeError: it holds what JSON cannot.
    """
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {TAG: "dict", "items": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, tuple):
        return {TAG: "tuple", "items": [pack(item) for item in value]}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"an entry of this task holds {value!r}, a {type(value).__name__}, which JSON cannot hold")


def unpack(value: Any) -> Any:
    """The inverse of ``pack``."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = [unpack(item) for item in value["items"]] if TAG in value else []
    match value.get(TAG):
        case "tuple":
            return tuple(items)
        case "dict":
            return dict(items)
        case _:
            return {key: unpack(item) for key, item in value.items()}


TAG = "$type"


@lru_cache(maxsize=16)
def _dataset(task: str, config: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(config))


def _is_json_list(of: type) -> Callable[[str], bool]:
    def check(answer: str) -> bool:
        try:
            value = json.loads(answer)
        except ValueError:
            return False
        return isinstance(value, list) and all(isinstance(item, of) for item in value)

    return check


def _is_box_plan(answer: str) -> bool:
    return _is_json_list(dict)(answer) and all(
        isinstance(move, str) for step in json.loads(answer) for move in step.values()
    )


def _is_product(answer: str) -> bool:
    return re.fullmatch(r"[0-9]{1,100}(\s*×\s*[0-9]{1,100})*", answer) is not None


def _is_probability(answer: str) -> bool:
    try:
        return math.isfinite(float(Fraction(answer.replace(",", ""))))
    except (ValueError, ZeroDivisionError, OverflowError):
        return False


ANSWER_FORMS: dict[str, Callable[[str], bool]] = {
    "boxnet": _is_box_plan,
    "coin_flip": _is_probability,
    "game_of_life": _is_json_list(list),
    "prime_factorization": _is_product,
}
"""Tasks whose scoring raises on text that is not of the right form, and that form; such text scores 0."""
