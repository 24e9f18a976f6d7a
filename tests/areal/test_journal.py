from __future__ import annotations

import multiprocessing
import os
import sqlite3
import threading
from pathlib import Path

import pytest
from rollout_helpers import trajectory

from areal.rollout.journal import Journal, JournalError, Lease, ReplayDiverged, episode_id
from areal.rollout.recovery import audit, new_lineage, recover, rewind
from areal.rollout.runlock import RunFolderInUse
from areal.rollout.trajectory import Trajectory

LIMIT = 12


def identify(place: int) -> tuple[str, int, int]:
    epoch, position = divmod(place, 6)
    return f"q{position}", epoch, position


def lease(journal: Journal, count: int = 1) -> list[Lease]:
    return journal.lease(count, 2, LIMIT, identify)


def samples(group: Lease, version: int = 0) -> list[Trajectory]:
    return [trajectory(version, episode=episode_id(group.group_id, n)) for n in range(2)]


def complete(journal: Journal, count: int, version: int = 0) -> list[Lease]:
    groups = lease(journal, count)
    for group in groups:
        journal.complete_group(group.group_id, samples(group, version))
    return groups


def train(journal: Journal, step: int, groups: list[Lease], digest: str | None = None) -> None:
    journal.record_batch(step, [t.id for group in groups for t in samples(group)], seed=step)
    if digest is not None:
        journal.finish_batch(step, digest)


@pytest.fixture
def journal(tmp_path: Path):
    journal = Journal.open(tmp_path / "run", "config")
    yield journal
    journal.close()


def reopen(journal: Journal) -> Journal:
    journal.close()
    return Journal.open(journal.folder, "config")


def test_leases_in_prompt_order_returned_first(journal: Journal) -> None:
    assert [g.place for g in lease(journal, 3)] == [0, 1, 2]
    journal.return_prompt("1.0", "timeout")
    again = lease(journal, 2)
    assert [(g.place, g.attempts, g.group_id) for g in again] == [(1, 1, "1.1"), (3, 0, "3.0")]
    assert [g.place for g in lease(journal, 99)] == list(range(4, LIMIT))
    assert lease(journal) == []


def test_a_group_goes_from_lease_to_trained(journal: Journal) -> None:
    groups = complete(journal, 2)
    assert journal.counts() == {"prompt/complete": 2, "trajectory/complete": 4}
    stored = journal.complete_groups()
    assert [(place, len(found)) for place, _, found in stored] == [(0, 2), (1, 2)]
    assert stored[0][2][1].logprobs.tolist() == samples(groups[0])[1].logprobs.tolist()
    train(journal, 0, groups)
    assert journal.complete_groups() == []
    journal.finish_batch(0, "d1")
    assert journal.counts() == {"prompt/trained": 2, "trajectory/trained": 4}
    audit(journal, finished=True)


def test_drops_are_counted_by_reason_without_tokens(journal: Journal) -> None:
    first, second = lease(journal, 2)
    journal.drop_prompt(first.group_id, "filtered", samples(first))
    journal.drop_prompt(second.group_id, "error:ValueError")
    assert journal.counts() == {
        "prompt/dropped": 2,
        "prompt/dropped/filtered": 1,
        "prompt/dropped/error:ValueError": 1,
        "trajectory/dropped": 2,
        "trajectory/dropped/filtered": 2,
    }
    with pytest.raises(JournalError, match="not in the journal"):
        journal.trajectories([samples(first)[0].id])
    with pytest.raises(JournalError, match="not leased"):
        journal.complete_group(first.group_id, [])
    audit(journal, finished=True)


def test_a_batch_takes_whole_groups_once_and_in_order(journal: Journal) -> None:
    groups = complete(journal, 2)
    ids = [t.id for t in samples(groups[0])]
    with pytest.raises(JournalError, match="next step 0"):
        journal.record_batch(1, ids, 0)
    with pytest.raises(JournalError, match="a group trains whole"):
        journal.record_batch(0, ids[:1], 0)
    with pytest.raises(JournalError, match="2 of 3"):
        journal.record_batch(0, [*ids, "nobody/0"], 0)
    assert journal.steps == 0, "a refused batch leaves nothing behind"
    journal.record_batch(0, ids, 0)
    journal.record_batch(0, ids, 0)
    with pytest.raises(JournalError, match="recorded otherwise"):
        journal.record_batch(0, ids, 1)
    with pytest.raises(JournalError, match="0 of 2"):
        journal.record_batch(1, ids, 0)
    with pytest.raises(JournalError, match="was not recorded"):
        journal.finish_batch(1, "d")


def test_one_process_per_folder(journal: Journal) -> None:
    with pytest.raises(RunFolderInUse, match=rf"process {os.getpid()} on .* since \d{{4}}-"):
        Journal.open(journal.folder, "config")

    def other(queue: multiprocessing.Queue) -> None:
        try:
            Journal.open(journal.folder, "config")
        except RunFolderInUse as error:
            queue.put(str(error))

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=other, args=(queue,))
    process.start()
    assert f"process {os.getpid()}" in queue.get(timeout=20)
    process.join(20)
    reopen(journal).close()


def test_a_run_that_made_no_step_may_be_corrected_and_starts_over(journal: Journal) -> None:
    complete(journal, 1)
    journal.record_checkpoint(0, "digest", "step_0")
    journal.close()
    corrected = Journal.open(journal.folder, "corrected")
    assert not corrected.resumed and corrected.counts() == {} and corrected.checkpoints() == []
    corrected.close()


def test_refuses_another_run_and_another_schema(journal: Journal) -> None:
    train(journal, 0, complete(journal, 1), "d1")
    journal.close()
    with pytest.raises(JournalError, match="configuration config, this one is other"):
        Journal.open(journal.folder, "other")
    connection = sqlite3.connect(journal.folder / "journal.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(JournalError, match="journal schema 99"):
        Journal.open(journal.folder, "config")


def test_durability_settings(journal: Journal) -> None:
    with journal.transaction() as db:
        assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert db.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_transaction_is_all_or_nothing_across_calls(journal: Journal) -> None:
    first, second = lease(journal, 2)
    with pytest.raises(JournalError), journal.transaction():
        journal.complete_group(first.group_id, samples(first))
        journal.complete_group("nobody", samples(second))
    assert journal.counts() == {"prompt/leased": 2}


def test_threads_share_it(journal: Journal) -> None:
    taken: list[int] = []

    def work() -> None:
        while groups := lease(journal):
            journal.complete_group(groups[0].group_id, samples(groups[0]))
            taken.append(groups[0].place)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(taken) == list(range(LIMIT))
    audit(journal)


def test_recovery_plan(journal: Journal) -> None:
    groups = complete(journal, 4)
    train(journal, 0, groups[:1], "d1")
    journal.record_checkpoint(1, "d1", "checkpoints/step_1")
    train(journal, 1, groups[1:2], "d2")
    train(journal, 2, groups[2:3])
    lease(journal, 2)
    journal = reopen(journal)
    assert journal.resumed
    checkpoint = journal.latest_checkpoint()
    assert checkpoint is not None and checkpoint.step == 1
    plan = recover(journal, checkpoint.step)
    assert [(batch.step, batch.digest, batch.seed) for batch in plan.batches] == [(1, "d2", 1), (2, None, 2)]
    assert (plan.version, plan.returned) == (3, 2)
    assert [t.id for t in journal.trajectories(plan.batches[0].trajectory_ids)] == plan.batches[0].trajectory_ids
    assert [place for place, _, _ in journal.complete_groups()] == [3]
    journal.finish_batch(1, "d2")
    journal.finish_batch(2, "d3")
    assert [(g.place, g.attempts) for g in lease(journal, 2)] == [(4, 0), (5, 0)], "a kill is not a failed attempt"
    audit(journal)
    journal.close()


def test_recovery_refuses_a_foreign_checkpoint(journal: Journal) -> None:
    with pytest.raises(JournalError, match="belongs to another run"):
        recover(journal, 3)


def test_diverging_replay_starts_a_lineage(journal: Journal) -> None:
    first = complete(journal, 2, version=0)
    train(journal, 0, first[:1], "d1")
    second = complete(journal, 2, version=1)
    train(journal, 1, [first[1]], "d2")
    train(journal, 2, second[:1], "d3")
    journal.record_checkpoint(3, "d3", "step_3")
    journal = reopen(journal)
    recover(journal, 0)
    with pytest.raises(ReplayDiverged) as caught:
        journal.finish_batch(0, "other")
    assert caught.value.step == 0
    assert new_lineage(journal, 0, "other", "replay diverged") == 1
    assert journal.steps == 1 and journal.latest_checkpoint() is None
    assert journal.counts() == {
        "prompt/trained": 1,
        "prompt/complete": 1,
        "prompt/pending": 2,
        "trajectory/trained": 2,
        "trajectory/complete": 2,
        "trajectory/dropped": 4,
        "trajectory/dropped/dead_version": 4,
    }
    audit(journal)
    journal = reopen(journal)
    assert journal.lineage == 1
    assert [(batch.step, batch.digest) for batch in recover(journal, 0).batches] == [(0, "other")]
    train(journal, 1, [first[1]], "d2b")
    assert [g.place for g in lease(journal, 2)] == [2, 3]
    audit(journal)
    journal.close()


def test_pruning_bounds_the_file_and_recovery_says_so(journal: Journal) -> None:
    size = []
    for step in range(6):
        groups = lease(journal, 2)
        for group in groups:
            big = [trajectory(step, tokens=20_000, episode=episode_id(group.group_id, n)) for n in range(2)]
            journal.complete_group(group.group_id, big)
        train(journal, step, groups, f"d{step}")
        journal.record_checkpoint(step + 1, f"d{step}", f"step_{step + 1}")
        journal.prune(step + 1)
        size.append((journal.folder / "journal.db").stat().st_size)
    assert size[-1] < 1.5 * size[1]
    with pytest.raises(JournalError, match="recover from checkpoint 6 or later, not from 2"):
        recover(journal, 2)
    assert recover(journal, 6).batches == []
    with pytest.raises(JournalError, match="cannot prune before step 7"):
        journal.prune(7)
    audit(journal, finished=True)


def test_end_of_run_drops_leftovers(journal: Journal) -> None:
    groups = complete(journal, 3)
    lease(journal, 1)
    train(journal, 0, groups[:1])
    with pytest.raises(JournalError, match="step 0 is recorded but not finished"):
        journal.end_run()
    journal.finish_batch(0, "d1")
    journal.return_prompt(lease(journal, 1)[0].group_id, "timeout")
    with pytest.raises(JournalError, match="no terminal state"):
        audit(journal, finished=True)
    assert journal.end_run() == 4
    assert journal.counts()["prompt/dropped/run_ended"] == 4
    audit(journal, finished=True)


def test_audit_finds_what_is_double(journal: Journal) -> None:
    groups = complete(journal, 2)
    train(journal, 0, groups[:1], "d1")
    with journal.transaction() as db:
        db.execute(
            "INSERT INTO batch (lineage, step, trajectory_ids, seed, last_place) "
            "SELECT 0, 1, trajectory_ids, 0, 1 FROM batch"
        )
    with pytest.raises(JournalError, match="two batches of one lineage"):
        audit(journal)


def test_returned_prompt_must_be_the_same_row(journal: Journal) -> None:
    lease(journal)
    journal.interrupt()
    with pytest.raises(JournalError, match="place 0 held prompt 'q0', the dataset has 'x'"):
        journal.lease(1, 2, LIMIT, lambda place: ("x", 0, place))


def test_rewinding_undoes_the_unrecorded_step_and_no_terminal_state_before_it(journal: Journal) -> None:
    first, second, third = lease(journal, 3)
    journal.complete_group(first.group_id, samples(first))
    journal.complete_group(second.group_id, samples(second))
    journal.drop_prompt(third.group_id, "filtered")  # the last place of the step, and not trained
    train(journal, 0, [first, second], "d1")
    fourth, fifth = lease(journal, 2)
    journal.complete_group(fourth.group_id, samples(fourth, version=1))
    journal.drop_prompt(fifth.group_id, "filtered")
    assert rewind(journal) == 2
    assert journal.counts()["prompt/dropped/filtered"] == 1
    assert [again.place for again in lease(journal, 3)] == [3, 4, 5]
    audit(journal)


def test_groups_of_weights_that_were_never_proven_are_sampled_again(journal: Journal) -> None:
    train(journal, 0, complete(journal, 1), "d1")
    train(journal, 1, complete(journal, 1, version=1))  # recorded, and cut off before its weights were proven
    proven, unproven = complete(journal, 1, version=1) + complete(journal, 1, version=2)
    plan = recover(journal, 0)
    assert [batch.digest for batch in plan.batches] == ["d1", None]
    assert [place for place, *_ in journal.complete_groups()] == [proven.place]
    assert [again.place for again in lease(journal, 1)] == [unproven.place]
    audit(journal)
