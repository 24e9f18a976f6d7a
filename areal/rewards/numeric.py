"""Rewards for answers that are one number."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])-?\.\d+")


def last_number(text: str) -> Decimal | None:
    """The last number in a text, such as ``-1,234.50``; None where there is none. ``5-3`` ends in 3."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def to_number(value: Any) -> Decimal:
    """A reference answer as a number.

    Raises:
        ValueError: it is none.
    """
    try:
        number = Decimal(str(value).strip().replace(",", "").removeprefix("$"))
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite():
        raise ValueError(f"the reference answer {value!r} is not a number; this reward compares numbers")
    return number


def reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **data: Any
) -> float:
    """1.0 if the last number of the completion equals ``answer``, else 0.0."""
    return float(last_number(completion) == to_number(answer))
