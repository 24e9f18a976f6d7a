"""Dataset: rows that every loader makes alike, and the errors that name what a row lacks."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

Row = dict[str, Any]
RESERVED = ("prompt", "completion", "prompt_ids", "completion_ids")
"""Names of a reward function's own arguments; no other column may have them."""


class DatasetError(ValueError):
    """A dataset cannot be loaded as asked; the message names the path, the row or key, and the way out."""


@dataclass(frozen=True, eq=False)
class Dataset(Sequence[Row]):
    """Rows to roll out on.

    Every row has ``id`` (str, unique, the same in every load), ``messages`` (a list of ``{"role", "content"}``) and,
    where the source has one, ``answer`` (str); further columns reach the reward function as they are. All is JSON-able.

    Attributes:
        rows: the rows, in the order of the source.
        reward_fn: import path of the reward that belongs to the source; None where only the user knows one.
    """

    rows: list[Row]
    reward_fn: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def as_messages(content: str, system_prompt: str | None = None) -> list[dict[str, str]]:
    """A single-turn conversation that asks for an answer."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": content}]


def nearest(name: str, known: Collection[str]) -> str:
    """What an error adds about a name that is not known: the nearest one, or all if none is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def check_keys(given: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raise DatasetError for the first key of ``dataset_kwargs`` that ``what`` does not take."""
    for key in given:
        if key not in known:
            raise DatasetError(f"dataset_kwargs.{key}: {what} takes no such key; {nearest(key, known)}")
