"""The asynchronous loop: wait for a batch, train, publish, prove, record. One screen, in the order it happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archon.weights import digest
from areal.config import Config, ConfigError, load_config
from areal.logs import log_file
from areal.metrics.logger import MetricsLogger, read_metrics
from areal.metrics.plot import plot_reward
from areal.metrics.rollout import rollout_metrics
from areal.rollout import recovery
from areal.rollout.episodes import Batch
from areal.rollout.journal import ReplayDiverged
from areal.rollout.trajectory import Trajectory, pack
from areal.rollout.workflow import Workflow
from areal.run import Run
from areal.timers import Timer

logger = logging.getLogger(__name__)

SCHEDULERS = {"inline": Run}
"""What ``scheduler.type`` chooses: how the parts of a run are placed."""


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        before, after: held-out reward before the first and after the last step; None where it was not measured.
        prompts: held-out prompts.
        steps: completed training steps.
        seconds: of this process.
    """

    run_dir: Path
    before: float | None
    after: float | None
    prompts: int
    steps: int
    seconds: float

    @property
    def summary(self) -> str:
        """The last line of a run."""
        before, after = ("-" if value is None else f"{value:.3f}" for value in (self.before, self.after))
        return (
            f"held-out reward: {before} -> {after} ({self.prompts} prompts, {self.steps} steps, {self.seconds:.0f} s)"
        )


class Trainer:
    """Runs a recipe from this process; the same configuration resumes where it was interrupted.

    ::

        from areal import Trainer

        print(Trainer("configs/quickstart.yaml", reward_fn=my_reward).train().summary)

    Args:
        config: a ``Config``, a dict of its keys, or the path of a recipe.
        workflow, reward_fn, train_rows, valid_rows: Python objects in place of what the configuration names.

    Raises:
        ConfigError: the configuration is wrong.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path,
        *,
        workflow: Workflow | None = None,
        reward_fn: Callable[..., Any] | None = None,
        train_rows: Sequence[Mapping[str, Any]] | None = None,
        valid_rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if not isinstance(config, Config):
            config = load_config(dict(config) if isinstance(config, Mapping) else config)
        self.config = config
        self._objects: dict[str, Any] = {
            "workflow": workflow,
            "reward_fn": reward_fn,
            "train_rows": train_rows,
            "valid_rows": valid_rows,
        }

    def train(self) -> Result:
        """Train to the end and measure.

        Raises:
            ConfigError: something that the configuration names does not exist or does not fit.
            RunFolderInUse: another process trains in the same folder.
            WorkflowFailure: no prompt gets anywhere; the message carries the last traceback.
        """
        began = time.monotonic()
        with (
            log_file(self.config.run_dir / "logs" / "controller.log"),
            SCHEDULERS[self.config.scheduler.type](self.config, **self._objects) as run,
        ):
            if run.journal.resumed and self.config.recover.mode == "off":
                raise ConfigError(
                    f"recover.mode = 'off': {run.folder} holds a run already; set recover.mode=auto to resume it, or "
                    "choose another trial_name"
                )
            run.check()
            loop = _Loop(run)
            loop.begin()
            while (batch := run.executor.next_batch(run.engine.version)) is not None:
                loop.step(batch)
            loop.finish()
            rewards = {row["step"]: row.get("eval/reward") for row in read_metrics(run.folder / "metrics.jsonl")}
            prompts = len(run.valid_data.rows) if run.valid_data else 0
            steps = run.engine.version
            return Result(run.folder, rewards.get(0), rewards.get(steps), prompts, steps, time.monotonic() - began)


class _Loop:
    def __init__(self, run: Run) -> None:
        self.run, self.actor = run, run.config.actor
        self.loss = run.loss_spec()
        self.digest = ""
        self.saver, self.evaluator, self.checkpointer = (
            Timer(timer.freq_epochs, timer.freq_steps, timer.freq_secs, steps_per_epoch=run.steps_per_epoch)
            for timer in (run.config.saver, run.config.evaluator, run.config.recover)
        )

    def begin(self) -> None:
        """Bring weights, engine and records to where the run stands, and let prompts in."""
        run = self.run
        if (checkpoint := run.journal.latest_checkpoint()) is not None:
            run.load_checkpoint(checkpoint)
        else:
            run.checkpoint()
        replayed = self._replay()
        version, written = run.engine.version, run.logged_steps()
        self.metrics = MetricsLogger(
            run.folder, run.config.stats_logger.tensorboard.path, next_step=min(written, version + 1)
        )
        run.start_engine()
        self._publish()
        if written == 0 and version == 0:
            before = run.evaluate() if run.config.evaluator.eval_before_train else {}
            self.metrics.log(0, 0, before)
            if before:
                run.view.message(f"held-out reward before the first step: {before['eval/reward']:.3f}")
        elif version == run.total_steps:
            run.view.message(
                f"{run.folder} is finished: nothing is left to train; choose another trial_name to train anew"
            )
        for step, metrics in replayed.items():
            if step >= written:
                self.metrics.log(step, step, metrics)
        run.executor.start(version)

    def _replay(self) -> dict[int, dict[str, float]]:
        """Train the recorded batches after the checkpoint again; returns their metrics by step."""
        run, replayed = self.run, {}
        plan = recovery.recover(run.journal, run.engine.version)
        if run.config.rollout.deterministic_sampling:
            recovery.rewind(run.journal)
        for batch in plan.batches:
            trajectories = run.journal.trajectories(batch.trajectory_ids)
            replayed[batch.step + 1] = self._train(trajectories) | rollout_metrics(trajectories, batch.step)
            found = digest(run.engine.publish().tensors())
            try:
                run.journal.finish_batch(batch.step, found)
            except ReplayDiverged as error:
                logger.warning("%s; a new lineage begins", error)
                recovery.new_lineage(run.journal, batch.step, found, str(error))
                break
            finally:
                self._export_if_due(batch.step + 1)
        return replayed

    def step(self, batch: Batch) -> None:
        """One version: record, train, publish, prove, and what is due after it."""
        run, began = self.run, time.monotonic()
        run.journal.record_batch(batch.version, batch.trajectory_ids, batch.seed)
        metrics = self._train(batch.trajectories) | rollout_metrics(batch.trajectories, batch.version)
        trained = time.monotonic()
        metrics |= self._publish()
        run.journal.finish_batch(batch.version, self.digest)
        published = time.monotonic()
        seconds, step = published - began + batch.waited, run.engine.version
        metrics |= {
            "time/step": seconds,
            "time/rollout_wait": batch.waited,
            "time/train": trained - began,
            "time/update": published - trained,
            "throughput/tokens_per_second": metrics["tokens/total"] / seconds,
        }
        if run.config.rollout.max_head_offpolicyness:
            run.executor.set_version(step)  # rollouts go on while the held-out prompts are measured
        if self.evaluator.due(step) or step == run.total_steps:
            metrics |= run.evaluate()
        if not run.config.rollout.max_head_offpolicyness:
            run.executor.set_version(step)
        metrics |= run.rollout_counters()
        self.metrics.log(step, step, metrics)
        run.view.step(step, run.total_steps, metrics)
        self._export_if_due(step)
        if self.checkpointer.due(step):
            run.checkpoint()

    def _export_if_due(self, step: int) -> None:
        folder = self.run.folder / "hf" / f"step_{step}"
        if self.saver.due(step) and not folder.exists():
            self.run.engine.save(folder)

    def _train(self, trajectories: list[Trajectory]) -> dict[str, float]:
        batch = pack(trajectories)
        if self.actor.use_decoupled_loss and self.actor.prox_logp_method == "recompute":
            proximal = self.run.engine.forward(batch).logprobs
            assert proximal is not None
            batch = batch.with_tokens(prox_logprobs=proximal)
        return self.run.engine.train_step(batch, self.loss, n_minibatches=self.actor.ppo_n_minibatches)

    def _publish(self) -> dict[str, float]:
        self.digest, difference = self.run.publish()
        return {"update/canary": difference}

    def finish(self) -> None:
        """Measure and export the final weights, record the end, draw the curve."""
        run, step = self.run, self.run.engine.version
        rows = {row["step"]: row for row in read_metrics(run.folder / "metrics.jsonl")}
        if step and "eval/reward" not in rows[step]:
            # Prompts ran out before the step that was expected to be the last, or the run broke while it measured.
            self.metrics.log_more(step, run.evaluate())
        latest = run.journal.latest_checkpoint()
        if latest is None or latest.step < step:
            run.checkpoint()
        run.engine.save(run.folder / "hf" / f"step_{step}")
        self.metrics.close()
        plot_reward(run.folder / "metrics.jsonl", run.folder / "plots" / "reward.png")
