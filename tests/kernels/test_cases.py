"""The helper that chooses cases leaves no pair of values out."""

from __future__ import annotations

import itertools
from typing import Any

from cases import pairwise


def test_every_pair_that_can_be_is_in_one_of_few_cases() -> None:
    values: dict[str, tuple[Any, ...]] = {"a": (0, 1, 2, 3), "b": ("x", "y", "z"), "c": (False, True), "d": (5, 6)}

    def valid(a: int, c: bool, **_: Any) -> bool:
        return not (c and a == 3)

    chosen = pairwise(valid, **values)
    assert all(valid(**case) for case in chosen) and len(chosen) < 20
    for (one, firsts), (other, seconds) in itertools.combinations(values.items(), 2):
        for first, second in itertools.product(firsts, seconds):
            possible = (one, other, first, second) != ("a", "c", 3, True)
            assert possible == any((case[one], case[other]) == (first, second) for case in chosen)
