from __future__ import annotations

from pathlib import Path

import pytest
from rollout_helpers import rows

from areal.rollout.journal import Journal
from areal.rollout.prompts import PromptSource


@pytest.fixture
def journal(tmp_path: Path):
    journal = Journal.open(tmp_path, "config")
    yield journal
    journal.close()


def order(source: PromptSource) -> list[str]:
    return [source.prompt(place).id for place in range(len(source))]


def test_every_epoch_is_a_new_permutation_of_all_rows(journal: Journal) -> None:
    source = PromptSource(rows(20), journal, seed=3, epochs=3)
    ids = order(source)
    epochs = [ids[0:20], ids[20:40], ids[40:60]]
    assert all(sorted(epoch) == sorted(row["id"] for row in rows(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_seed_and_epoch_alone(journal: Journal) -> None:
    ids = order(PromptSource(rows(20), journal, seed=3, epochs=2))
    again = PromptSource(rows(20), journal, seed=3, epochs=5)
    assert [again.prompt(place).id for place in reversed(range(40))] == ids[::-1]
    assert order(PromptSource(rows(20), journal, seed=4, epochs=2)) != ids
    assert ids[:6] == ["q14", "q9", "q2", "q5", "q13", "q1"], "a resumed run relies on this order"


def test_unshuffled_is_the_dataset(journal: Journal) -> None:
    source = PromptSource(rows(3), journal, seed=0, shuffle=False, epochs=2)
    assert order(source) == ["q0", "q1", "q2"] * 2
    prompt, lease = source.lease(1, 1)[0]
    assert (prompt.data["question"], prompt.epoch, prompt.position, lease.place) == (0, 0, 0, 0)


def test_bad_rows_are_named(journal: Journal) -> None:
    with pytest.raises(ValueError, match="0 rows"):
        PromptSource([], journal, seed=0)
    with pytest.raises(ValueError, match=r"row 1 of the dataset has no 'id'; it has \['text'\]"):
        PromptSource([{"id": "a"}, {"text": "b"}], journal, seed=0)
    with pytest.raises(ValueError, match="rows 0 and 2 of the dataset share the id '1'"):
        PromptSource([{"id": 1}, {"id": 2}, {"id": 1}], journal, seed=0)
