"""The durable record of a run: which prompt is where, what was sampled, what was trained and in which order.

SQLite in WAL mode with ``synchronous=FULL``: what a method wrote is on disk when it returns, and a kill at any moment
leaves the state before or after a method, never between. One process writes (`RunLock`); its threads share one
connection under a lock. Recovery, lineages and the audit are in `areal.rollout.recovery`.

States of a prompt: no row or ``pending`` → ``leased`` → ``complete`` → ``trained``, or ``dropped`` with a reason.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from areal.rollout.journal_schema import SCHEMA, SCHEMA_VERSION
from areal.rollout.runlock import RunLock
from areal.rollout.trajectory import Trajectory


class JournalError(RuntimeError):
    """The journal does not allow this, or is not the journal of this run."""


class ReplayDiverged(JournalError):
    """A replayed batch did not give the recorded weights.

    Attributes:
        step: the batch. recorded, replayed: the two digests.
    """

    def __init__(self, step: int, recorded: str, replayed: str) -> None:
        super().__init__(f"step {step} gave weights {replayed} where {recorded} was recorded; start a new lineage")
        self.step, self.recorded, self.replayed = step, recorded, replayed


@dataclass(frozen=True)
class Lease:
    """A prompt handed out: its place in prompt order, how often it failed before, and the id of this group."""

    place: int
    id: str
    epoch: int
    position: int
    attempts: int
    group_id: str


@dataclass(frozen=True)
class Checkpoint:
    """Training state on disk after ``step`` completed steps."""

    step: int
    digest: str
    path: str


class Journal:
    """See the module. Made by `Journal.open`."""

    def __init__(self, folder: Path, lock: RunLock, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self.resumed = False
        self.lineage = 0
        self._lock_file = lock
        self._connection = connection
        self._mutex = RLock()
        self._depth = 0

    @classmethod
    def open(cls, folder: str | Path, config_digest: str) -> Journal:
        """Open or create ``<folder>/journal.db`` for the run whose configuration has this digest.

        ``resumed`` says whether it holds anything. A run that made no step yet may be corrected: another digest then
        empties it.

        Raises:
            RunFolderInUse: another process (or this one) has it open.
            JournalError: the folder holds another run, or one written by another version of the schema.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder)
        try:
            connection = sqlite3.connect(
                folder / "journal.db", isolation_level=None, check_same_thread=False, timeout=30
            )
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                connection.execute(f"PRAGMA {pragma}")
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, SCHEMA_VERSION):
                raise JournalError(
                    f"{folder} was written with journal schema {found}, this program has {SCHEMA_VERSION}; "
                    "finish that run with its own version or choose another trial_name"
                )
            journal = cls(folder, lock, connection)
            with journal.transaction() as db:
                if found == 0:
                    for statement in SCHEMA.split(";\n"):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                    db.execute("INSERT INTO run VALUES (0, ?, 0, 'start', ?)", (config_digest, time.time()))
                journal.lineage, recorded = db.execute(
                    "SELECT lineage, config_digest FROM run ORDER BY lineage DESC LIMIT 1"
                ).fetchone()
                begun = db.execute("SELECT EXISTS (SELECT 1 FROM batch)").fetchone()[0]
                if recorded != config_digest and not begun:
                    # No step was made yet: the configuration may still be corrected, and the run starts over.
                    for table in ("trajectory", "episode", "prompt", "checkpoint"):
                        db.execute(f"DELETE FROM {table}")
                    db.execute("UPDATE run SET config_digest = ?", (config_digest,))
                    recorded = config_digest
                journal.resumed = db.execute(
                    "SELECT EXISTS (SELECT 1 FROM prompt) OR EXISTS (SELECT 1 FROM checkpoint)"
                ).fetchone()[0]
            if recorded != config_digest:
                raise JournalError(
                    f"{folder} holds a run of configuration {recorded}, this one is {config_digest}; "
                    "resume it with its own config.yaml or choose another trial_name"
                )
            return journal
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Close the file and let go of the folder. Idempotent."""
        with self._mutex:
            self._connection.close()
            self._lock_file.release()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; nests, and only the outermost commits (one flush to disk for many calls)."""
        with self._mutex:
            if self._depth == 0:
                self._connection.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield self._connection
            except BaseException:
                if self._depth == 1 and self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            else:
                if self._depth == 1:
                    self._connection.execute("COMMIT")
            finally:
                self._depth -= 1

    def lease(
        self, count: int, samples: int, limit: int, identify: Callable[[int], tuple[str, int, int]]
    ) -> list[Lease]:
        """Hand out up to ``count`` prompts: returned ones first, then new ones, each in prompt order.

        Args:
            samples: episodes per group.
            limit: number of places of the run (rows times epochs).
            identify: place → (id, epoch, position).

        Raises:
            JournalError: a returned prompt has another id now.
        """
        with self.transaction() as db:
            returned = db.execute(
                "SELECT place, attempts, leases, id FROM prompt WHERE state = 'pending' ORDER BY place LIMIT ?",
                (count,),
            ).fetchall()
            fresh = db.execute("SELECT coalesce(max(place) + 1, 0) FROM prompt").fetchone()[0]
            new = range(fresh, min(limit, fresh + count - len(returned)))
            leases = []
            for place, attempts, times, known_id in [*returned, *((place, 0, 0, None) for place in new)]:
                id_, epoch, position = identify(place)
                if known_id not in (None, id_):
                    raise JournalError(
                        f"place {place} held prompt {known_id!r}, the dataset has {id_!r} there: data, their order or "
                        "the seed changed; resume with the same data or choose another trial_name"
                    )
                lease = Lease(place, id_, epoch, position, attempts, f"{place}.{times}")
                db.execute(
                    "INSERT INTO prompt (place, id, epoch, position, state, group_id) VALUES (?, ?, ?, ?, 'leased', ?) "
                    "ON CONFLICT (place) DO UPDATE SET state = 'leased', leases = leases + 1, "
                    "group_id = excluded.group_id",
                    (place, id_, epoch, position, lease.group_id),
                )
                db.executemany(
                    "INSERT INTO episode (id, group_id, place, sample, state) VALUES (?, ?, ?, ?, 'running')",
                    [(episode_id(lease.group_id, n), lease.group_id, place, n) for n in range(samples)],
                )
                leases.append(lease)
            return leases

    def complete_group(self, group_id: str, trajectories: Sequence[Trajectory]) -> None:
        """All episodes of a group succeeded: keep their trajectories for training."""
        with self.transaction() as db:
            self._end_lease(db, group_id, "complete", None)
            db.execute("UPDATE episode SET state = 'complete' WHERE group_id = ?", (group_id,))
            self._insert(db, group_id, trajectories, reason=None)

    def drop_prompt(self, group_id: str, reason: str, sampled: Sequence[Trajectory] = ()) -> None:
        """The prompt ends untrained; what was sampled is recorded without its tokens, under the same reason."""
        self._fail(group_id, "dropped", reason, sampled)

    def return_prompt(self, group_id: str, reason: str, sampled: Sequence[Trajectory] = ()) -> None:
        """An attempt failed; the prompt will be leased again, before any new one."""
        self._fail(group_id, "pending", reason, sampled)

    def _fail(self, group_id: str, state: str, reason: str, sampled: Sequence[Trajectory]) -> None:
        with self.transaction() as db:
            self._end_lease(db, group_id, state, reason)
            done = json.dumps([trajectory.episode_id for trajectory in sampled])
            db.execute(
                "UPDATE episode SET reason = ?, state = "
                "iif(id IN (SELECT value FROM json_each(?)), 'complete', 'failed') WHERE group_id = ?",
                (reason, done, group_id),
            )
            self._insert(db, group_id, sampled, reason=reason)

    def _end_lease(self, db: sqlite3.Connection, group_id: str, state: str, reason: str | None) -> None:
        changed = db.execute(
            "UPDATE prompt SET state = ?1, reason = ?2, attempts = attempts + (?2 IS NOT NULL) "
            "WHERE group_id = ?3 AND state = 'leased'",
            (state, reason, group_id),
        ).rowcount
        if changed != 1:
            raise JournalError(f"group {group_id} is not leased, so it cannot become {state}")

    def _insert(
        self, db: sqlite3.Connection, group_id: str, trajectories: Sequence[Trajectory], reason: str | None
    ) -> None:
        place = db.execute("SELECT place FROM prompt WHERE group_id = ?", (group_id,)).fetchone()[0]
        db.executemany(
            "INSERT INTO trajectory (id, episode_id, group_id, place, oldest_version, newest_version, lineage, state, "
            "reason, blob) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (t.id, t.episode_id, group_id, place, t.oldest_version, t.newest_version, self.lineage)
                + (("complete", None, t.to_bytes()) if reason is None else ("dropped", reason, None))
                for t in trajectories
            ],
        )

    def complete_groups(self) -> list[tuple[int, str, list[Trajectory]]]:
        """(place, group id, trajectories) of complete groups that no batch holds, in prompt order."""
        groups: dict[str, tuple[int, str, list[Trajectory]]] = {}
        with self.transaction() as db:
            rows = db.execute(
                "SELECT t.place, t.group_id, t.blob FROM trajectory t JOIN prompt USING (group_id) "
                "WHERE prompt.state = 'complete' AND t.state = 'complete' AND t.step IS NULL ORDER BY t.place, t.rowid"
            )
            for place, group_id, blob in rows:
                groups.setdefault(group_id, (place, group_id, []))[2].append(Trajectory.from_bytes(blob))
        return list(groups.values())

    def abandon_group(self, group_id: str, reason: str) -> None:
        """A complete group cannot be trained any more: drop its trajectories, lease its prompt again.

        It is not the fault of the prompt, so the attempt does not count.
        """
        with self.transaction() as db:
            changed = db.execute(
                "UPDATE prompt SET state = 'pending', reason = ? WHERE group_id = ? AND state = 'complete'",
                (reason, group_id),
            ).rowcount
            if changed != 1:
                raise JournalError(f"group {group_id} is not complete, so it cannot be abandoned")
            db.execute(
                "UPDATE trajectory SET state = 'dropped', reason = ?, step = NULL, blob = NULL WHERE group_id = ?",
                (reason, group_id),
            )

    def interrupt(self, reason: str = "interrupted") -> int:
        """Give all leased prompts back, uncounted as attempts; returns how many."""
        with self.transaction() as db:
            db.execute("UPDATE episode SET state = 'failed', reason = ? WHERE state = 'running'", (reason,))
            return db.execute(
                "UPDATE prompt SET state = 'pending', reason = ? WHERE state = 'leased'", (reason,)
            ).rowcount

    def end_run(self, reason: str = "run_ended") -> int:
        """Every prompt that was ever leased and is not trained becomes dropped; returns how many."""
        with self.transaction() as db:
            open_batch = db.execute("SELECT step FROM batch WHERE live AND digest IS NULL").fetchone()
            if open_batch:
                raise JournalError(
                    f"step {open_batch[0]} is recorded but not finished; finish it before ending the run"
                )
            self.interrupt(reason)
            db.execute(
                "UPDATE trajectory SET state = 'dropped', reason = ?, blob = NULL WHERE state = 'complete'", (reason,)
            )
            return db.execute(
                "UPDATE prompt SET state = 'dropped', reason = ? WHERE state IN ('pending', 'complete')", (reason,)
            ).rowcount

    @property
    def steps(self) -> int:
        """Number of recorded steps, finished or not, of the living lineage."""
        with self.transaction() as db:
            return int(db.execute("SELECT count(*) FROM batch WHERE live").fetchone()[0])

    def record_batch(self, step: int, trajectory_ids: Sequence[str], seed: int) -> None:
        """Fix what step ``step`` trains, before it starts. A replay may record the same again.

        Raises:
            JournalError: the step is not the next one, was recorded otherwise, splits a group, or names a trajectory
                that is not complete or belongs to another batch.
        """
        ids = json.dumps(list(trajectory_ids))
        with self.transaction() as db:
            known = db.execute("SELECT trajectory_ids, seed FROM batch WHERE live AND step = ?", (step,)).fetchone()
            if known == (ids, seed):
                return
            if known or step != self.steps:
                raise JournalError(f"step {step} is recorded otherwise, or is not the next step {self.steps}")
            changed = db.execute(
                "UPDATE trajectory SET step = ? WHERE state = 'complete' AND step IS NULL "
                "AND id IN (SELECT value FROM json_each(?))",
                (step, ids),
            ).rowcount
            if not trajectory_ids or changed != len(trajectory_ids):
                raise JournalError(
                    f"step {step}: {changed} of {len(trajectory_ids)} trajectories are complete and in no other batch"
                )
            split = db.execute(
                "SELECT group_id FROM trajectory WHERE state = 'complete' AND step IS NULL AND group_id IN "
                "(SELECT group_id FROM trajectory WHERE step = ?)",
                (step,),
            ).fetchone()
            if split:
                raise JournalError(f"step {step} would train a part of group {split[0]}; a group trains whole")
            db.execute(
                "INSERT INTO batch (lineage, step, trajectory_ids, seed, last_place) "
                "VALUES (?, ?, ?, ?, (SELECT max(place) FROM prompt))",
                (self.lineage, step, ids, seed),
            )

    def finish_batch(self, step: int, digest: str) -> None:
        """The step is trained and its weights, of this digest, are published.

        Raises:
            ReplayDiverged: the batch was finished before with another digest; call `recovery.new_lineage`.
        """
        with self.transaction() as db:
            row = db.execute("SELECT digest FROM batch WHERE live AND step = ?", (step,)).fetchone()
            if row is None:
                raise JournalError(f"step {step} was not recorded before it was trained")
            if row[0] not in (None, digest):
                raise ReplayDiverged(step, row[0], digest)
            db.execute("UPDATE batch SET digest = ? WHERE live AND step = ?", (digest, step))
            db.execute("UPDATE trajectory SET state = 'trained' WHERE step = ?", (step,))
            db.execute(
                "UPDATE prompt SET state = 'trained' WHERE place IN (SELECT place FROM trajectory WHERE step = ?)",
                (step,),
            )

    def trajectories(self, ids: Iterable[str]) -> list[Trajectory]:
        """Stored trajectories, in the given order."""
        with self.transaction() as db:
            found = []
            for trajectory_id in ids:
                row = db.execute("SELECT blob FROM trajectory WHERE id = ?", (trajectory_id,)).fetchone()
                if row is None or row[0] is None:
                    raise JournalError(f"the tokens of trajectory {trajectory_id} are not in the journal any more")
                found.append(Trajectory.from_bytes(row[0]))
            return found

    def record_checkpoint(self, step: int, digest: str, path: str | Path) -> None:
        """A checkpoint of ``step`` completed steps is complete under its final name."""
        with self.transaction() as db:
            row = (step, digest, str(path), time.time())
            db.execute("INSERT OR REPLACE INTO checkpoint VALUES (?, ?, ?, ?)", row)

    def checkpoints(self) -> list[Checkpoint]:
        """Recorded checkpoints, oldest first."""
        with self.transaction() as db:
            return [Checkpoint(*row) for row in db.execute("SELECT step, digest, path FROM checkpoint ORDER BY step")]

    def forget_checkpoint(self, step: int) -> None:
        """Its folder is about to be deleted."""
        with self.transaction() as db:
            db.execute("DELETE FROM checkpoint WHERE step = ?", (step,))

    def latest_checkpoint(self) -> Checkpoint | None:
        with self.transaction() as db:
            row = db.execute("SELECT step, digest, path FROM checkpoint ORDER BY step DESC LIMIT 1").fetchone()
            return Checkpoint(*row) if row else None

    def prune(self, before_step: int) -> None:
        """Forget the tokens trained before a checkpointed step, so that the file stays bounded."""
        latest = self.latest_checkpoint()
        if latest is None or before_step > latest.step:
            raise JournalError(f"cannot prune before step {before_step}: the latest checkpoint is {latest}")
        with self.transaction() as db:
            db.execute(
                "UPDATE trajectory SET blob = NULL WHERE step IN "
                "(SELECT step FROM batch WHERE live AND NOT pruned AND step < ?)",
                (before_step,),
            )
            db.execute("UPDATE batch SET pruned = 1 WHERE live AND step < ?", (before_step,))

    def counts(self) -> dict[str, int]:
        """Rows by ``prompt/<state>``, ``trajectory/<state>`` and ``…/dropped/<reason>``."""
        totals: dict[str, int] = {}
        with self.transaction() as db:
            for table in ("prompt", "trajectory"):
                for state, reason, count in db.execute(
                    f"SELECT state, iif(state = 'dropped', reason, NULL), count(*) FROM {table} GROUP BY 1, 2"
                ):
                    totals[f"{table}/{state}"] = totals.get(f"{table}/{state}", 0) + count
                    if reason is not None:
                        totals[f"{table}/{state}/{reason}"] = count
        return totals


def episode_id(group_id: str, sample: int) -> str:
    """Unique in a run."""
    return f"{group_id}.{sample}"
