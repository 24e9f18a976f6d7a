"""The staleness gate: how many groups may be in flight, and which of them the next training step must take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Key = int
"""A group, by the place of its prompt in prompt order."""


@dataclass
class _Place:
    version: int
    """While running: version at admission. When finished: version of the oldest trained token."""
    state: Literal["running", "complete", "rejected"] = "running"


class StalenessGate:
    """Bounds the age of trained tokens without ever having to throw one away.

    A *place* is a group that was admitted and not yet trained: running, complete, or, with ``rejections_fill``,
    rejected. A step consumes ``batch_size`` places. Two rules, with B = ``batch_size``, η = ``max_head_offpolicyness``
    and v = version = completed steps:

    *Capacity.* running + accepted ≤ (η + v + 1) B, where the v completed steps count B accepted places each, whatever
    they trained. So at most (η + 1) B places exist, also right after a recovery at a large v. ``total_steps`` caps the
    right side at ``total_steps`` · B: nothing is admitted that no step will train.

    *Age.* A place whose version is w may be trained by the steps that start at versions ≤ w + η: its deadline. (A
    running group can only have tokens as old as its admission or younger, so w is then the version at admission.) A
    step is started only if every remaining place can still meet its deadline, B per step; otherwise it waits for the
    old groups that are still running. With D(s) = places of deadline ≤ s the step at v must leave D'(v + k) ≤ k B for
    every k ≥ 0, that is, take at least D(v + k) - k B places of deadline ≤ v + k. For k = 0: every place that would be
    too old after this step is in this batch.

    *Why at most B places are ever due*, so that the rule never deadlocks. Invariant: D(v + k) ≤ (k + 1) B for every
    k ≥ 0. An admission at v has deadline v + η, so it changes D(v + k) only for k ≥ η, and there D ≤ all places ≤
    (η + 1) B by capacity. Completion and rejection only raise or remove deadlines. A step keeps the invariant because
    D'(v + 1 + k) ≤ (k + 1) B is the age rule itself. Hence each bound D(v + k) - k B is at most B; since the places are
    nested by deadline, the B oldest meet all bounds at once, and as soon as they have finished the step can start.
    Taking the oldest B *finished* places meets every bound that any choice of finished places meets.

    Pure and not thread-safe: the owner holds a lock.
    """

    def __init__(
        self,
        batch_size: int,
        max_head_offpolicyness: int,
        *,
        total_steps: int | None = None,
        rejections_fill: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; a step trains at least one group")
        if max_head_offpolicyness < 0:
            raise ValueError(
                f"max_head_offpolicyness is {max_head_offpolicyness}; 0 is synchronous, more is asynchronous"
            )
        self.batch_size = batch_size
        self.max_head_offpolicyness = max_head_offpolicyness
        self.total_steps = total_steps
        self.rejections_fill = rejections_fill
        self.version = 0
        self._places: dict[Key, _Place] = {}
        self._training = 0

    @property
    def running(self) -> list[Key]:
        """Groups in flight, in prompt order."""
        return sorted(key for key, place in self._places.items() if place.state == "running")

    @property
    def waiting(self) -> list[Key]:
        """Complete groups that no step has taken, in prompt order."""
        return sorted(key for key, place in self._places.items() if place.state == "complete")

    @property
    def steps_left(self) -> bool:
        return self.total_steps is None or self.version < self.total_steps

    def capacity(self) -> int:
        """How many groups may be admitted now."""
        steps = self.max_head_offpolicyness + self.version + 1
        if self.total_steps is not None:
            steps = min(steps, self.total_steps)
        consumed = self.version * self.batch_size + self._training
        return max(0, steps * self.batch_size - consumed - len(self._places))

    def admit(self, key: Key) -> None:
        """A group starts now, under the current version."""
        if key in self._places:
            raise ValueError(f"group {key} is admitted already")
        if self.capacity() < 1:
            raise ValueError(f"no capacity for group {key} at version {self.version}")
        self._places[key] = _Place(self.version)

    def complete(self, key: Key, oldest_version: int | None) -> None:
        """A group finished; ``oldest_version`` of its trained tokens, None if none is trained.

        Raises:
            ValueError: a token is older than the admission of its group, which the age rule relies on.
        """
        place = self._running(key)
        if oldest_version is not None and oldest_version < place.version:
            raise ValueError(f"group {key}, admitted at version {place.version}, has a token of {oldest_version}")
        place.version = place.version if oldest_version is None else oldest_version
        place.state = "complete"

    def admitted_at(self, key: Key) -> int:
        """Version at the admission of a running group."""
        return self._running(key).version

    def reject(self, key: Key) -> None:
        """A group ended without anything to train."""
        place = self._running(key)
        if self.rejections_fill:
            place.state = "rejected"
        else:
            del self._places[key]

    def release(self, key: Key) -> None:
        """A group failed and its prompt will be admitted again."""
        self._running(key)
        del self._places[key]

    def select(self, *, final: bool = False) -> list[Key] | None:
        """Places for the step that starts at the current version, in prompt order; None: wait, []: nothing is left.

        Args:
            final: no prompt is left to admit, so that the last batch may be smaller.
        """
        if not self.steps_left:
            return []
        finished = sorted((p.version, key) for key, p in self._places.items() if p.state != "running")
        chosen = finished[: self.batch_size]
        if len(chosen) < self.batch_size and not (final and len(finished) == len(self._places)):
            return None
        for ahead in range(self.max_head_offpolicyness + 1):
            oldest = self.version + ahead - self.max_head_offpolicyness
            due = sum(place.version <= oldest for place in self._places.values()) - ahead * self.batch_size
            if sum(version <= oldest for version, _ in chosen) < due:
                return None
        return sorted(key for _, key in chosen)

    def must_train_now(self) -> list[Key]:
        """Places, running or finished, that would be too old for any step after the one at the current version."""
        oldest = self.version - self.max_head_offpolicyness
        return sorted(key for key, place in self._places.items() if place.version <= oldest)

    def take(self, keys: Iterable[Key]) -> list[Key]:
        """A step takes these places; they count until ``advance``. Returns those that hold something to train."""
        if self._training:
            raise ValueError(f"the step at version {self.version} has its batch; advance before the next")
        taken = {key: self._places.pop(key) for key in keys}
        self._training = self.batch_size
        return [key for key, place in taken.items() if place.state == "complete"]

    def discard(self, keys: Iterable[Key]) -> None:
        """Free places that were all rejected: no step is made of them."""
        for key in keys:
            if self._places.pop(key).state != "rejected":
                raise ValueError(f"group {key} is not rejected")

    def advance(self, version: int) -> None:
        """A step is done and its weights serve."""
        if version != self.version + 1:
            raise ValueError(f"version goes from {self.version} to {self.version + 1}, not to {version}")
        self.version = version
        self._training = 0

    def rebase(self, version: int, waiting: Mapping[Key, int | None]) -> list[Key]:
        """Start again at a recovered version with the complete groups of the journal and their oldest versions.

        Returns the groups that no schedule of the coming steps can train within the age bound (or at all): give their
        prompts back. Oldest groups are kept first, so that nothing is dropped that need not be.
        """
        self.version, self._training, self._places = version, 0, {}
        unfit: list[Key] = []
        for known, key in sorted((version if oldest is None else oldest, key) for key, oldest in waiting.items()):
            steps_until_deadline = known + self.max_head_offpolicyness + 1 - version
            room = min(steps_until_deadline * self.batch_size - len(self._places), self.capacity())
            if known > version or room < 1:
                unfit.append(key)
            else:
                self._places[key] = _Place(known, "complete")
        return sorted(unfit)

    def _running(self, key: Key) -> _Place:
        place = self._places.get(key)
        if place is None or place.state != "running":
            raise ValueError(f"group {key} is not running")
        return place
