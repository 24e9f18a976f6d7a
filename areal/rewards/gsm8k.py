"""Reward for GSM8K and other word problems whose answer is one number."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from areal.rewards.numeric import last_number, to_number

EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
TAIL = 2000
"""Characters at the end of a completion among which its answer is looked for."""
EXPLOSIVE = re.compile(r"\^|\*\*|!")


def reference(answer: Any) -> Decimal:
    """The number of a reference answer: what follows ``####``, or the whole text.

    Raises:
        ValueError: it is no number.
    """
    return to_number(str(answer).rpartition("####")[2])


def reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **data: Any
) -> float:
    r"""1.0 if the completion's answer equals the number after ``####`` in ``answer``, else 0.0.

    The completion's answer is the number after its last ``####`` if it has one; else what math-verify finds: the last
    ``\boxed{}``, then an announced answer, then the last number. A power or a factorial is no answer to a word problem:
    evaluating one can take for ever, so it scores 0.
    """
    expected = reference(answer)
    text = completion[-TAIL:]
    _, marker, stated = text.rpartition("####")
    if marker:
        return float(last_number(stated.lstrip().partition("\n")[0]) == expected)
    _, box, rest = text.rpartition("\\boxed")
    text = box + rest  # math-verify would make a set of several boxes
    # math-verify's own timeouts use signals, which only work in a main thread: the deadline is the pool's
    found = parse(text, extraction_config=EXTRACTION, parsing_timeout=None)
    if not found or EXPLOSIVE.search(str(found[-1])):
        return 0.0
    return float(verify(parse(str(expected), parsing_timeout=None), found, float_rounding=6, timeout_seconds=None))
