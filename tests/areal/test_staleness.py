"""The gate: capacity, age, and a simulation of whole runs in virtual time."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.rollout.staleness import StalenessGate


def test_capacity_follows_the_rule() -> None:
    gate = StalenessGate(batch_size=3, max_head_offpolicyness=2)
    assert gate.capacity() == (2 + 0 + 1) * 3
    for key in range(9):
        gate.admit(key)
    assert gate.capacity() == 0
    with pytest.raises(ValueError, match="no capacity"):
        gate.admit(9)
    for key in (4, 0, 2):
        gate.complete(key, 0)
    gate.take([0, 2, 4])
    assert gate.capacity() == 0, "a batch in training still counts"
    gate.advance(1)
    assert gate.capacity() == 3


def test_zero_offpolicyness_is_synchronous() -> None:
    gate = StalenessGate(2, 0)
    gate.admit(0)
    gate.admit(1)
    assert gate.capacity() == 0
    gate.complete(0, 0)
    assert gate.select() is None
    gate.complete(1, 0)
    assert gate.select() == [0, 1]


def test_total_steps_bound_admission() -> None:
    gate = StalenessGate(2, 4, total_steps=2)
    assert gate.capacity() == 4
    assert gate.rebase(2, {}) == []
    assert gate.capacity() == 0
    assert gate.select() == []


def test_rejections_fill_places_only_when_asked() -> None:
    for fills, left in ((False, 2), (True, 1)):
        gate = StalenessGate(2, 0, rejections_fill=fills)
        gate.admit(0)
        gate.reject(0)
        assert gate.capacity() == left


def test_a_step_waits_for_the_group_it_would_make_too_old() -> None:
    gate = StalenessGate(1, 1)
    gate.admit(0)
    gate.admit(1)
    gate.complete(1, 0)
    assert gate.select() == [1], "at version 0 both may still be trained later"
    gate.take([1])
    gate.advance(1)
    gate.admit(2)
    gate.complete(2, 1)
    assert gate.must_train_now() == [0]
    assert gate.select() is None, "training 2 now would make 0 too old"
    gate.complete(0, 0)
    assert gate.select() == [0]


def test_a_step_looks_ahead_when_more_groups_fall_due_than_one_step_holds() -> None:
    gate = StalenessGate(1, 2)
    for key in range(3):
        gate.admit(key)
    gate.complete(0, 0)
    gate.take([0])
    gate.advance(1)
    gate.admit(3)
    gate.complete(3, 1)
    assert gate.select() is None, "1 and 2 must go at versions 1 and 2, so 3 must not"


def test_younger_tokens_relax_the_deadline() -> None:
    gate = StalenessGate(1, 1)
    gate.admit(0)
    gate.admit(1)
    gate.complete(0, 0)
    gate.take([0])
    gate.advance(1)
    gate.complete(1, 1)
    gate.admit(2)
    gate.complete(2, 1)
    assert gate.must_train_now() == []
    with pytest.raises(ValueError, match="admitted at version 1"):
        gate.take(gate.select() or [])
        gate.advance(2)
        gate.rebase(1, {})
        gate.admit(5)
        gate.complete(5, 0)


def test_rebase_keeps_what_can_be_trained_in_time() -> None:
    gate = StalenessGate(2, 2)
    waiting = {0: 7, 1: 8, 2: 8, 3: 8, 4: 9, 5: 10, 6: 10, 7: 10, 8: 11}
    # At 10: version 7 is too old, two of version 8 fit the step at 10, 11 is not from this past.
    assert gate.rebase(10, waiting) == [0, 3, 8]
    assert gate.capacity() == 0
    assert gate.select() == [1, 2]


@dataclass
class Simulation:
    """A run in virtual time; ``moment`` is the time, ``ends`` the future ends of groups."""

    gate: StalenessGate
    prompts: int
    random: random.Random

    def run(self) -> None:
        gate, rng, eta = self.gate, self.random, self.gate.max_head_offpolicyness
        moment, trainer_free_at, next_key = 0.0, 0.0, 0
        ends: list[tuple[float, int]] = []
        returned: list[int] = []
        known: dict[int, int] = {}  # oldest token of complete groups
        attempts: dict[int, int] = {}
        self.terminal: dict[int, str] = {}
        self.staleness: list[int] = []
        self.taken: list[int] = []
        training = False

        def end(key: int, how: str) -> None:
            assert key not in self.terminal
            self.terminal[key] = how

        for _ in range(200 * self.prompts + 1000):
            while gate.capacity() and (returned or next_key < self.prompts):
                if returned:
                    key = returned.pop(0)
                else:
                    key, next_key = next_key, next_key + 1
                gate.admit(key)
                delay = 30.0 if rng.random() < 0.1 else rng.random()
                heapq.heappush(ends, (moment + delay, key))
            bound = (eta + 1) * gate.batch_size
            assert len(gate.running) + len(gate.waiting) + gate._training <= bound
            assert len(gate.must_train_now()) <= gate.batch_size
            exhausted = not returned and next_key == self.prompts and gate.capacity() > 0
            if not training:
                places = gate.select(final=exhausted and not gate.running)
                if places == []:
                    break
                if places is not None:
                    if not any(key in known for key in places):
                        gate.discard(places)
                        continue
                    for key in gate.take(places):
                        self.staleness.append(gate.version - known.pop(key))
                        self.taken.append(key)
                        end(key, "trained")
                    training, trainer_free_at = True, moment + rng.random()
            if training and (not ends or trainer_free_at <= ends[0][0]):
                moment, training = trainer_free_at, False
                gate.advance(gate.version + 1)
                if rng.random() < 0.1:  # crash: running groups are leased again, complete ones are taken up again
                    returned += [key for _, key in ends]
                    ends.clear()
                    for key in gate.rebase(gate.version, known):
                        del known[key]
                        returned.append(key)
                    returned.sort()
                continue
            assert ends, "deadlock: nothing runs, the trainer waits"
            moment, key = heapq.heappop(ends)
            fate = rng.random()
            if fate < 0.1:
                attempts[key] = attempts.get(key, 0) + 1
                if attempts[key] < 3:
                    gate.release(key)
                    returned = sorted([*returned, key])
                    continue
            if fate < 0.2:
                gate.reject(key)
                end(key, "dropped")
            else:
                known[key] = rng.randint(gate.admitted_at(key), gate.version)
                gate.complete(key, known[key])
        else:
            raise AssertionError("the run does not end")


@settings(max_examples=120, deadline=None)
@given(
    batch_size=st.integers(1, 5),
    eta=st.integers(0, 4),
    prompts=st.integers(1, 60),
    fills=st.booleans(),
    limit=st.one_of(st.none(), st.integers(1, 8)),
    seed=st.integers(0, 2**32),
)
def test_every_run_ends_within_the_bound(
    batch_size: int, eta: int, prompts: int, fills: bool, limit: int | None, seed: int
) -> None:
    gate = StalenessGate(batch_size, eta, total_steps=limit, rejections_fill=fills)
    simulation = Simulation(gate, prompts, random.Random(seed))
    simulation.run()
    assert all(0 <= age <= eta for age in simulation.staleness)
    assert len(set(simulation.taken)) == len(simulation.taken)
    if limit is None:
        assert sorted(simulation.terminal) == list(range(prompts)), "every prompt reaches exactly one terminal state"
    else:
        assert gate.version <= limit
