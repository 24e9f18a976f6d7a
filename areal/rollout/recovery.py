"""What a journal says after a crash: what to replay, what is still usable, and whether all of it adds up."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from areal.rollout.journal import Journal, JournalError


@dataclass(frozen=True)
class RecordedBatch:
    """A step to train again, exactly. ``digest`` is that of the weights it gave, None if it had not finished."""

    step: int
    trajectory_ids: list[str]
    seed: int
    digest: str | None


@dataclass(frozen=True)
class RecoveryPlan:
    """What to do after loading the checkpoint of ``checkpoint_step`` completed steps.

    Attributes:
        batches: to replay in this order, each with `Journal.trajectories`, then `Journal.finish_batch`.
        version: completed steps after the replay, if it does not diverge.
        returned: prompts that were being sampled and are leased again.
    """

    checkpoint_step: int
    batches: list[RecordedBatch]
    version: int
    returned: int


def recover(journal: Journal, checkpoint_step: int) -> RecoveryPlan:
    """Give unfinished leases back and list the recorded batches after a checkpoint.

    Complete groups stay; the executor takes them up again or abandons them by age when it starts. Those sampled by
    weights whose step was never finished, and so never proven, are dropped and their prompts leased again.

    Raises:
        JournalError: the batches after the checkpoint are not all there, or their tokens were pruned.
    """
    with journal.transaction() as db:
        rows = db.execute(
            "SELECT step, trajectory_ids, seed, digest, pruned FROM batch WHERE live AND step >= ? ORDER BY step",
            (checkpoint_step,),
        ).fetchall()
        if checkpoint_step > journal.steps:
            raise JournalError(
                f"checkpoint {checkpoint_step} is ahead of the {journal.steps} steps in the journal of "
                f"{journal.folder}: it belongs to another run"
            )
        pruned = [step for step, *_, was_pruned in rows if was_pruned]
        if pruned:
            raise JournalError(
                f"the tokens of steps {pruned[0]} to {pruned[-1]} were pruned; recover from checkpoint "
                f"{pruned[-1] + 1} or later, not from {checkpoint_step}"
            )
        finished = db.execute("SELECT count(*) FROM batch WHERE live AND digest IS NOT NULL").fetchone()[0]
        unproven = db.execute(
            "SELECT DISTINCT t.group_id FROM trajectory t JOIN prompt USING (group_id) "
            "WHERE prompt.state = 'complete' AND t.step IS NULL AND t.newest_version > ?",
            (finished,),
        ).fetchall()
        for (group_id,) in unproven:
            journal.abandon_group(group_id, "unproven_version")
        batches = [RecordedBatch(step, json.loads(ids), seed, digest) for step, ids, seed, digest, _ in rows]
        return RecoveryPlan(checkpoint_step, batches, journal.steps, journal.interrupt())


def new_lineage(journal: Journal, step: int, digest: str, reason: str) -> int:
    """The replay of ``step`` gave other weights, of ``digest``: go on from them. Returns the new lineage.

    Later steps never happened. Of the groups that they trained, and of those that wait, the ones sampled by versions
    up to ``step`` are complete again; the others were sampled by weights that no longer exist and are dropped as
    ``dead_version``, their prompts leased again.
    """
    with journal.transaction() as db:
        config_digest = db.execute("SELECT config_digest FROM run WHERE lineage = ?", (journal.lineage,)).fetchone()[0]
        lineage = journal.lineage + 1
        db.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?)", (lineage, config_digest, step, reason, time.time()))
        db.execute("UPDATE batch SET live = 0 WHERE live AND step > ?", (step,))
        db.execute("UPDATE batch SET lineage = ? WHERE live AND step = ?", (lineage, step))
        db.execute("UPDATE batch SET digest = NULL WHERE live AND step = ?", (step,))
        db.execute("DELETE FROM checkpoint WHERE step > ?", (step,))
        undone = "SELECT place FROM trajectory WHERE step > ?"
        db.execute(f"UPDATE prompt SET state = 'complete' WHERE place IN ({undone})", (step,))
        db.execute("UPDATE trajectory SET state = 'complete', step = NULL WHERE step > ?", (step,))
        dead = db.execute(
            "SELECT DISTINCT t.group_id FROM trajectory t JOIN prompt USING (group_id) "
            "WHERE prompt.state = 'complete' AND t.step IS NULL AND t.newest_version > ?",
            (step,),
        ).fetchall()
        for (group_id,) in dead:
            journal.abandon_group(group_id, "dead_version")
        journal.finish_batch(step, digest)
    journal.lineage = lineage
    return lineage


def rewind(journal: Journal) -> int:
    """Undo all that was sampled for a step that was not recorded yet; returns how many prompts are leased again.

    For deterministic sampling: the step begins as it began before, with all of its prompts, so that the same requests
    share each forward of the engine and every bit comes out the same. Synchronously every prompt leased before a batch
    was recorded has ended by then, so what was leased later belongs to the next step.
    """
    with journal.transaction() as db:
        last = db.execute("SELECT coalesce(max(last_place), -1) FROM batch WHERE live").fetchone()[0]
        db.execute(
            "UPDATE trajectory SET state = 'dropped', reason = 'rewound', blob = NULL WHERE place > ? AND step IS NULL",
            (last,),
        )
        return db.execute(
            "UPDATE prompt SET state = 'pending', reason = 'rewound', attempts = 0 WHERE place > ?", (last,)
        ).rowcount


def audit(journal: Journal, *, finished: bool = False) -> None:
    """Check that nothing is lost and nothing double.

    Args:
        finished: the run has ended, so every prompt must have reached its terminal state.

    Raises:
        JournalError: listing what is wrong.
    """
    checks = {
        "trained prompt without exactly one trained group": """
            SELECT place FROM prompt p WHERE state = 'trained' AND (SELECT count(DISTINCT group_id) FROM trajectory t
            WHERE t.place = p.place AND t.state = 'trained' AND t.step IS NOT NULL) != 1""",
        "prompt with a trained group that is not trained": """
            SELECT DISTINCT place FROM trajectory t JOIN prompt p USING (place)
            WHERE t.state = 'trained' AND p.state != 'trained'""",
        "complete prompt without tokens": """
            SELECT place FROM prompt p WHERE state = 'complete' AND NOT EXISTS (SELECT 1 FROM trajectory t
            WHERE t.group_id = p.group_id AND t.state = 'complete' AND t.blob IS NOT NULL)""",
        "waiting trajectory whose prompt is not complete": """
            SELECT t.id FROM trajectory t JOIN prompt p USING (place)
            WHERE t.state = 'complete' AND (p.state != 'complete' OR p.group_id != t.group_id)""",
        "dropped prompt or trajectory without a reason": """
            SELECT place FROM prompt WHERE state = 'dropped' AND reason IS NULL
            UNION ALL SELECT id FROM trajectory WHERE state = 'dropped' AND reason IS NULL""",
        "trajectory in two batches of one lineage": """
            SELECT value FROM batch, json_each(trajectory_ids) GROUP BY lineage, value HAVING count(*) > 1""",
        "trajectory in two living batches": """
            SELECT value FROM batch, json_each(trajectory_ids) WHERE live GROUP BY value HAVING count(*) > 1""",
        "trajectory whose batch does not list it": """
            SELECT t.id FROM trajectory t WHERE t.step IS NOT NULL AND NOT EXISTS
            (SELECT 1 FROM batch b, json_each(b.trajectory_ids) WHERE b.live AND b.step = t.step AND value = t.id)""",
        "trained trajectory in no finished batch": """
            SELECT t.id FROM trajectory t LEFT JOIN batch b ON b.live AND b.step = t.step
            WHERE t.state = 'trained' AND b.digest IS NULL""",
        "gap in the recorded steps": """
            SELECT step FROM batch b WHERE live AND step > 0 AND NOT EXISTS
            (SELECT 1 FROM batch a WHERE a.live AND a.step = b.step - 1)""",
    }
    if finished:
        checks["prompt in no terminal state"] = "SELECT place FROM prompt WHERE state NOT IN ('trained', 'dropped')"
        checks["place that was never leased"] = """
            SELECT max(place) FROM prompt HAVING max(place) + 1 != count(*)"""
    with journal.transaction() as db:
        found = {fault: [row[0] for row in db.execute(query + " LIMIT 5")] for fault, query in checks.items()}
    wrong = [f"{fault}: {', '.join(map(str, rows))}" for fault, rows in found.items() if rows]
    if wrong:
        raise JournalError(f"journal of {journal.folder} does not add up: {'; '.join(wrong)}")
