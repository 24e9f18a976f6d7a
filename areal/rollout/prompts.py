"""Prompts in the order of a run, whose position is nothing but what the journal says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal.rollout.journal import Journal, Lease


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset, at its place in the run.

    Attributes:
        id: unique in the dataset.
        place: ``epoch * rows + position``: prompt order over the whole run.
        epoch, position: which pass over the data, and where in its order.
        data: the row, as the dataset holds it.
    """

    id: str
    place: int
    epoch: int
    position: int
    data: Mapping[str, Any] = field(repr=False)


class PromptSource:
    """Leases prompts from a dataset, reshuffled every epoch by (seed, epoch) alone.

    It keeps no position: what was leased is in the journal, so a resumed run goes on where the journal stands, in any
    epoch, however often it is resumed.

    Raises:
        ValueError: no rows, no epochs, a row without ``id``, or two rows with the same one.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], journal: Journal, *, seed: int, shuffle: bool = True, epochs: int = 1
    ) -> None:
        if len(rows) == 0 or epochs < 1:
            raise ValueError(f"{len(rows)} rows and {epochs} epochs give no prompt")
        self._rows = rows
        self._ids: list[str] = []
        first: dict[str, int] = {}
        for index, row in enumerate(rows):
            if "id" not in row:
                raise ValueError(f"row {index} of the dataset has no 'id'; it has {sorted(row)}")
            name = str(row["id"])
            if first.setdefault(name, index) != index:
                raise ValueError(f"rows {first[name]} and {index} of the dataset share the id {name!r}; ids are unique")
            self._ids.append(name)
        self._journal = journal
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Places in the run: rows times epochs."""
        return len(self._rows) * self._epochs

    def lease(self, count: int, samples: int) -> list[tuple[Prompt, Lease]]:
        """Up to ``count`` prompts, in prompt order, returned ones first; fewer only when no more are left."""
        leases = self._journal.lease(count, samples, len(self), self._identify)
        return [(self.prompt(lease.place), lease) for lease in leases]

    def prompt(self, place: int) -> Prompt:
        """The prompt at a place of the run."""
        name, epoch, position = self._identify(place)
        return Prompt(name, place, epoch, position, self._rows[self._index(epoch, position)])

    def _identify(self, place: int) -> tuple[str, int, int]:
        epoch, position = divmod(place, len(self._rows))
        return self._ids[self._index(epoch, position)], epoch, position

    def _index(self, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        if epoch not in self._orders:
            # RandomState's streams are frozen by NumPy's policy, so a run resumes the same under a later NumPy.
            random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self._seed, epoch])))
            self._orders = {kept: order for kept, order in self._orders.items() if kept >= epoch - 1}
            self._orders[epoch] = random.permutation(len(self._rows))
        return int(self._orders[epoch][position])
