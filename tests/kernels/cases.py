"""How the kernel tests go through their cases: several in one test, as most take about a millisecond."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from archon_kernels import extension

IMPLEMENTATIONS = ("reference", "cpp")


@contextmanager
def noted(**case: Any) -> Iterator[None]:
    """A failure inside says which case it was."""
    try:
        yield
    except Exception as error:
        error.add_note(", ".join(f"{name}={value}" for name, value in case.items()))
        raise


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run the ops on so many threads, as tests of what these share must: the others run on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the ops in this implementation; skip the test where it cannot be built."""
    if implementation == "cpp" and not extension.load():
        pytest.skip(f"no C++ ops: {extension.problem()}")
    monkeypatch.setenv("ARCHON_KERNELS", implementation)


def pairwise(valid: Callable[..., bool] = lambda **_: True, **values: Sequence[Any]) -> list[dict[str, Any]]:
    """Few cases of one value for each name, with every pair of values that a valid case can have in one of them."""
    everything = [dict(zip(values, case, strict=True)) for case in itertools.product(*values.values())]
    cases = [(case, set(itertools.combinations(case.items(), 2))) for case in everything if valid(**case)]
    missing = set().union(*(pairs for _, pairs in cases))
    chosen = []
    while missing:
        case, pairs = max(cases, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(case)
        missing -= pairs
    return chosen
