"""Run: everything one run owns, built from its configuration and closed in order."""

from __future__ import annotations

import copy
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch

from archon.engine import Engine
from archon.losses import LossSpec
from archon.models.config import ModelConfig
from archon.optim import OptimizerConfig
from archon.parallel.fit import LayoutMisfit, check_fit
from archon.weights import WeightsError
from areal.config import Config, ConfigError, load_config, load_object, resolved_yaml
from areal.config_loader import blame
from areal.datasets import Dataset, DatasetError, load
from areal.evaluation import evaluate
from areal.inference.backend import Backend, BackendError
from areal.inference.deterministic import DeterministicWaves
from areal.inference.embedded import EmbeddedBackend
from areal.launch.local import LocalTrainer
from areal.metrics.console import ProgressView
from areal.metrics.logger import read_metrics
from areal.models import ModelNotFound, answer_ids, load_tokenizer, render, resolve_model
from areal.rewards.functions import RewardFunction
from areal.rewards.pool import RewardPool
from areal.rollout.episodes import EpisodeTask
from areal.rollout.errors import RejectedPrompt, Row
from areal.rollout.executor import RolloutExecutor
from areal.rollout.journal import Checkpoint, Journal, JournalError
from areal.rollout.loop import LoopThread
from areal.rollout.prompts import PromptSource
from areal.rollout.staleness import StalenessGate
from areal.rollout.trajectory import Trajectory
from areal.rollout.workflow import Episode, GenerationConfig, Workflow
from areal.run_identity import changed_keys, config_digest
from areal.threads import share_cores
from areal.training import TrainerClient, engine_options
from areal.warm_start import supervised_row, warm_start
from areal.weights.canary import TOLERANCE, canary_batch, check_canary
from areal.weights.update import update_weights

logger = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 2
STOP_SECONDS = 30.0
EVALUATION = -1
"""First entry of ``order`` of a held-out episode, so that it never equals that of a training episode."""

_LOSS_KEYS = (
    "eps_clip",
    "eps_clip_higher",
    "c_clip",
    "reward_norm",
    "adv_norm",
    "reward_scaling",
    "reward_bias",
    "reward_clip",
    "overlong_reward_penalty",
    "overlong_tokens",
    "overlong_penalty_factor",
    "mask_no_eos_with_zero",
    "discount",
    "gae_lambda",
    "use_decoupled_loss",
    "prox_logp_method",
    "rejection_sampling",
    "loss_aggregation",
    "entropy_coef",
)


class Run:
    """What a run owns. Parts are built when first used; ``close`` ends those that were.

    Args:
        config: the recipe.
        workflow: overrides ``config.workflow``: an object with ``async def run(self, data, **kwargs)``.
        reward_fn: overrides ``config.reward_fn``: a function.
        train_rows, valid_rows: override the datasets' rows.

    Raises:
        RunFolderInUse: another process holds the run folder.
        JournalError: the folder holds a run of another configuration.
    """

    def __init__(
        self,
        config: Config,
        *,
        workflow: Workflow | None = None,
        reward_fn: Callable[..., Any] | None = None,
        train_rows: Sequence[Mapping[str, Any]] | None = None,
        valid_rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if workflow is not None and reward_fn is not None:
            raise ConfigError(
                "a workflow object scores its episodes itself: give it the reward, and leave reward_fn out"
            )
        self.config = config
        self.folder = config.run_dir
        self._given_workflow, self._given_reward = workflow, reward_fn
        self._given_rows = {"train": train_rows, "valid": valid_rows}
        rollout = config.rollout
        self._trainer_threads, self._engine_threads = share_cores(rollout.max_head_offpolicyness, rollout.num_threads)
        if self._trainer_threads is not None:
            torch.set_num_threads(self._trainer_threads)
        self.view = ProgressView()
        self.journal = self._open_journal()
        if not self.journal.resumed:  # what a start that made no step may have left
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)
        (self.folder / "config.yaml").write_text(resolved_yaml(config))

    def check(self) -> None:
        """Look at everything that the configuration names before anything is computed.

        Raises:
            ConfigError: what a key names does not exist or does not fit.
        """
        with blame("actor.path", self.config.actor.path, FileNotFoundError, ValueError):
            shape = ModelConfig.from_folder(self.model_folder)
        with blame("actor.backend", self.config.actor.backend, LayoutMisfit):
            check_fit(self.config.actor.layout, shape, engine_options(self.config.actor))
        assert self.workflow and self.held_out_workflow
        if self.config.dynamic_filter_fn:
            load_object("dynamic_filter_fn", self.config.dynamic_filter_fn)
        for key in ("gconfig", "eval_gconfig"):
            section = getattr(self.config, key)
            with blame(f"{key}.stop", section.stop, ValueError):
                GenerationConfig(**section.model_dump()).all_stop_token_ids(self.tokenizer)
        assert self.train_data and (self.valid_data is None or self.valid_data)

    def _open_journal(self) -> Journal:
        try:
            return Journal.open(self.folder, config_digest(self.config, self._given_workflow, self._given_reward))
        except JournalError as error:
            known = self.folder / "config.yaml"
            changed = changed_keys(load_config(known), self.config) if known.exists() else []
            if not changed:
                raise
            raise ConfigError(
                f"{', '.join(changed)}: {self.folder} holds a run with other values; resume it as it was, or choose "
                "another trial_name"
            ) from error

    def __enter__(self) -> Run:
        self.view.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End what runs: prompts that were never trained are dropped by a run that ended, kept by one that broke."""
        with ExitStack() as stack:
            stack.callback(self.journal.close)
            stack.callback(self.view.__exit__, None, None, None)
            if "loop" in self.__dict__:
                stack.callback(self.loop.stop, STOP_SECONDS)
            if "reward_pool" in self.__dict__:
                stack.callback(self.loop.run, self.reward_pool.close(), STOP_SECONDS, "the reward workers to end")
            if "backend" in self.__dict__:
                stack.callback(self.loop.run, self.backend.stop(), STOP_SECONDS, "the rollout engine to stop")
            if "engine" in self.__dict__ and isinstance(self.engine, LocalTrainer):
                stack.callback(self.engine.close)
            if "executor" in self.__dict__:
                stack.callback(self.executor.stop, "run_ended" if kind is None else "interrupted")

    # Data

    @cached_property
    def model_folder(self) -> Path:
        with blame("actor.path", self.config.actor.path, ModelNotFound):
            return resolve_model(self.config.actor.path, self.folder / "models")

    @cached_property
    def tokenizer(self) -> Any:
        if self.config.tokenizer_path == self.config.actor.path:
            with blame("actor.path", self.config.actor.path, ModelNotFound):
                return load_tokenizer(self.model_folder)
        with blame("tokenizer_path", self.config.tokenizer_path, ModelNotFound):
            return load_tokenizer(resolve_model(self.config.tokenizer_path, self.folder / "models"))

    @cached_property
    def train_data(self) -> Dataset:
        return self._data("train")

    @cached_property
    def valid_data(self) -> Dataset | None:
        return self._data("valid") if self.config.valid_dataset or self._given_rows["valid"] else None

    def _data(self, which: str) -> Dataset:
        rows = self._given_rows[which]
        if rows is not None:
            return Dataset([dict(row) for row in rows])
        section = self.config.train_dataset if which == "train" else self.config.valid_dataset
        assert section is not None
        with blame(f"{which}_dataset.path", section.path, DatasetError):
            return load(section.path, section.split, dataset_kwargs=section.dataset_kwargs)

    @cached_property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.train_data.rows) / self.config.train_dataset.batch_size)

    @cached_property
    def total_steps(self) -> int:
        """Training steps of the run; fewer are made when rejections use prompts up."""
        prompts = len(self.train_data.rows) * self.config.total_train_epochs
        available = math.ceil(prompts / self.config.train_dataset.batch_size)
        return min(self.config.total_train_steps or available, available)

    # Training

    @cached_property
    def engine(self) -> TrainerClient:
        """The model under training: the pretrained one, a new one, or a new one after its warm start."""
        optimizer = OptimizerConfig(**self.config.actor.optimizer.model_dump(), total_steps=self.total_steps)
        if self.config.warm_start is None or self.journal.latest_checkpoint():
            return self._engine(self.model_folder, optimizer, self.config.actor.init_from_scratch)
        return self._engine(self._warm_start(), optimizer, init_from_scratch=False)

    def _engine(self, folder: Path, optimizer: OptimizerConfig, init_from_scratch: bool) -> Engine | LocalTrainer:
        """The engine itself for one rank, else processes of this machine that each run one."""
        actor = self.config.actor
        arguments: dict[str, Any] = {
            "layout": actor.layout,
            "optimizer": optimizer,
            "dtype": actor.dtype,
            "max_tokens_per_mb": actor.mb_spec.max_tokens_per_mb,
            "options": engine_options(actor),
            "init_from_scratch": init_from_scratch,
            "seed": self.config.seed,
        }
        with (
            blame("actor.backend", actor.backend, ValueError),
            blame("actor.path", actor.path, FileNotFoundError, WeightsError),
        ):
            if actor.layout.world_size == 1:
                return Engine.from_pretrained(folder, **arguments)
            return LocalTrainer(
                folder,
                logs=self.folder / "logs",
                num_threads=self._trainer_threads,
                deadline=actor.request_timeout,
                **arguments,
            )

    def _warm_start(self) -> Path:
        """Train a throw-away engine on (prompt, answer) rows and export it; returns the folder."""
        section = self.config.warm_start
        assert section is not None
        data = self.train_data
        if section.dataset is not None:
            chosen = section.dataset
            with blame("warm_start.dataset.path", chosen.path, DatasetError):
                data = load(chosen.path, chosen.split, dataset_kwargs=chosen.dataset_kwargs)
        with blame("warm_start.dataset", section.dataset and section.dataset.path, RejectedPrompt):
            rows = [
                supervised_row(render(self.tokenizer, row["messages"]), answer_ids(self.tokenizer, row["answer"]))
                for row in map(Row, data.rows)
            ]
        longest = max(len(row["input_ids"]) for row in rows)
        positions = ModelConfig.from_folder(self.model_folder).max_position_embeddings
        if longest > positions:
            raise ConfigError(
                f"warm_start.dataset: a row has {longest} tokens with its answer, the model has {positions} positions; "
                "take shorter rows"
            )
        optimizer = OptimizerConfig(lr=section.lr, beta2=0.95, weight_decay=0.0, warmup_steps=10)
        folder = self.folder / "hf" / "warm_start"
        with ExitStack() as stack:
            engine = self._engine(self.model_folder, optimizer, self.config.actor.init_from_scratch)
            if isinstance(engine, LocalTrainer):
                stack.callback(engine.close)
            with blame("warm_start.batch_size", section.batch_size, ValueError):
                warm_start(
                    engine,
                    rows,
                    steps=section.steps,
                    batch_size=section.batch_size,
                    target_loss=section.target_loss,
                    seed=self.config.seed,
                    report=partial(self.view.warm_start, section.steps),
                )
            engine.save(folder)
        return folder

    def loss_spec(self) -> LossSpec:
        """The policy loss of ``actor`` as text."""
        actor = self.config.actor.model_dump()
        config = {key: actor[key] for key in _LOSS_KEYS}
        return LossSpec(
            "areal.algorithms.grpo.GRPOLoss", config | {"max_new_tokens": self.config.gconfig.max_new_tokens}
        )

    def checkpoint(self) -> None:
        """Save the training state, record it, and forget what no recovery needs any more."""
        step = self.engine.version
        path = Path("checkpoints") / f"step_{step}"
        self.engine.save(self.folder / path, kind="checkpoint")
        self.journal.record_checkpoint(step, self.engine.digest(), path)
        self._forget_old_checkpoints()

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Restore a recorded training state, and prove it.

        Raises:
            JournalError: the folder does not hold the weights that were recorded.
        """
        path = self.folder / checkpoint.path
        self.engine.load(path)
        if (found := self.engine.digest()) != checkpoint.digest:
            raise JournalError(
                f"{path} holds weights {found[:12]}, the journal recorded {checkpoint.digest[:12]} at step "
                f"{checkpoint.step}: the folder was changed; restore it, or choose another trial_name"
            )

    def _forget_old_checkpoints(self) -> None:
        """Keep the latest recorded ones, and the tokens that a recovery from the oldest of them replays."""
        recorded = self.journal.checkpoints()
        for old in recorded[:-KEPT_CHECKPOINTS]:
            self.journal.forget_checkpoint(old.step)
        kept = recorded[-KEPT_CHECKPOINTS:]
        # Others are half-written, or of a lineage that a recovery could not reproduce.
        for folder in (self.folder / "checkpoints").iterdir():
            if folder.name not in {Path(checkpoint.path).name for checkpoint in kept}:
                shutil.rmtree(folder)
        self.journal.prune(kept[0].step)

    # Rollouts

    @cached_property
    def loop(self) -> LoopThread:
        """The thread that everything asynchronous runs on."""
        return LoopThread("rollout")

    @cached_property
    def backend(self) -> Backend:
        rollout = self.config.rollout
        with blame("rollout.max_model_len", rollout.max_model_len, ValueError):
            backend = EmbeddedBackend(
                self.model_folder,
                dtype=self.config.actor.dtype,
                max_model_len=rollout.max_model_len,
                kv_cache_tokens=rollout.kv_cache_tokens,
                num_threads=self._engine_threads,
                seed=self.config.seed,
                deterministic=rollout.deterministic_sampling,
            )
        return DeterministicWaves(backend) if rollout.deterministic_sampling else backend

    @cached_property
    def reward_pool(self) -> RewardPool:
        return RewardPool(self.config.rollout.reward_workers, self.config.rollout.reward_timeout)

    @cached_property
    def workflow(self) -> Workflow:
        return self._given_workflow or self._workflow(self._reward)

    @cached_property
    def held_out_workflow(self) -> Workflow:
        """The same, with the reward that measures held-out prompts."""
        section = self.config.valid_dataset
        if section is None or section.reward_fn is None:
            return self.workflow
        if self._given_workflow is not None:
            raise ConfigError(
                f"valid_dataset.reward_fn = {section.reward_fn!r}: a workflow object scores its episodes itself; leave "
                "the key out, or name the workflow in the configuration"
            )
        return self._workflow(load_object("valid_dataset.reward_fn", section.reward_fn))

    @property
    def _reward(self) -> RewardFunction | str:
        if self._given_reward is not None:
            return self._given_reward
        if self.config.reward_fn is not None:
            return cast(RewardFunction, load_object("reward_fn", self.config.reward_fn))
        if self.train_data.reward_fn is None:
            raise ConfigError(
                f"reward_fn = None: the dataset {self.config.train_dataset.path!r} brings no reward of its own; "
                "name one by its import path"
            )
        return self.train_data.reward_fn

    def _workflow(self, reward_fn: RewardFunction | str) -> Workflow:
        kind = load_object("workflow", self.config.workflow)
        with blame("workflow_kwargs", self.config.workflow_kwargs, TypeError, ValueError):
            return cast(Workflow, kind(reward_fn=reward_fn, **self.config.workflow_kwargs))

    @cached_property
    def executor(self) -> RolloutExecutor:
        config, rollout = self.config, self.config.rollout
        dataset = config.train_dataset
        samples = config.gconfig.n_samples
        most = dataset.batch_size * (rollout.max_head_offpolicyness + 1) * samples
        return RolloutExecutor(
            loop=self.loop,
            journal=self.journal,
            source=PromptSource(
                self.train_data.rows,
                self.journal,
                seed=config.seed,
                shuffle=dataset.shuffle,
                epochs=config.total_train_epochs,
            ),
            gate=StalenessGate(
                dataset.batch_size,
                rollout.max_head_offpolicyness,
                total_steps=self.total_steps,
                rejections_fill=config.dynamic_bs,
            ),
            run_episode=self._run_training_episode,
            n_samples=samples,
            max_concurrent=rollout.max_concurrent_rollouts or most,
            episode_timeout=rollout.episode_timeout,
            max_attempts=rollout.max_attempts,
            group_filter=load_object("dynamic_filter_fn", config.dynamic_filter_fn)
            if config.dynamic_filter_fn
            else None,
            seed=config.seed,
            fatal_errors=(BackendError,),
            on_live_change=self._set_live,
        )

    def start_engine(self) -> None:
        with blame("rollout.kv_cache_tokens", self.config.rollout.kv_cache_tokens, ValueError):
            self.loop.run(self.backend.start(), self.config.rollout.setup_timeout, "the rollout engine to start")

    def publish(self) -> tuple[str, float]:
        """Bring the trainer's weights to the engine and prove it; returns their digest and the canary's difference."""
        deadline = self.config.rollout.setup_timeout
        update = update_weights(
            self.engine.publish(),
            self.backend,
            mode=self.config.actor.weight_update_mode,
            model_folder=self.model_folder,
            scratch=self.folder,
            deadline=deadline,
        )
        digest = self.loop.run(update, deadline + STOP_SECONDS, f"the weight update to version {self.engine.version}")
        batch = canary_batch(ModelConfig.from_folder(self.model_folder).vocab_size)
        expected = self.engine.forward(batch).logprobs
        assert expected is not None
        check = check_canary(self.backend, batch, expected, TOLERANCE[self.config.actor.dtype])
        return digest, self.loop.run(check, deadline, "the canary")

    def rollout_counters(self) -> dict[str, float]:
        return self.executor.stats() | self.backend.metrics() | self.reward_pool.metrics()

    def logged_steps(self) -> int:
        """Steps, counting step 0, that ``metrics.jsonl`` holds."""
        path = self.folder / "metrics.jsonl"
        return max((row["step"] + 1 for row in read_metrics(path)), default=0) if path.exists() else 0

    async def _run_training_episode(self, task: EpisodeTask) -> list[Trajectory] | Trajectory | None:
        episode = self._episode(
            self.config.gconfig,
            self.config.train_dataset.max_length,
            prompt_id=task.prompt.id,
            group_id=task.group_id,
            episode_id=task.episode_id,
            order=task.order,
            is_eval=False,
        )
        return await self.workflow.run(Row(copy.deepcopy(dict(task.prompt.data))), episode=episode)

    def _episode(self, gconfig: Any, max_prompt_tokens: int | None, **identity: Any) -> Episode:
        return Episode(
            backend=self.backend,
            tokenizer=self.tokenizer,
            reward_pool=self.reward_pool,
            gconfig=GenerationConfig(**gconfig.model_dump()),
            max_prompt_tokens=max_prompt_tokens,
            **identity,
        )

    def _set_live(self, count: int) -> None:
        if isinstance(self.backend, DeterministicWaves):
            self.backend.set_live(count)

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out prompts under the weights that serve now; none without such prompts."""
        data, gconfig, rollout = self.valid_data, self.config.eval_gconfig, self.config.rollout
        if data is None:
            return {}
        version = self.backend.version
        length = self.config.valid_dataset.max_length if self.config.valid_dataset else None
        order = [(index, sample) for index in range(len(data.rows)) for sample in range(gconfig.n_samples)]

        async def run(index: int, sample: int) -> list[Trajectory]:
            row = data.rows[index]
            episode = self._episode(
                gconfig,
                length,
                prompt_id=str(row["id"]),
                group_id=f"eval.{version}.{index}",
                episode_id=f"eval.{version}.{index}.{sample}",
                order=(EVALUATION, index, sample),
                is_eval=True,
            )
            result = await self.held_out_workflow.run(Row(copy.deepcopy(row)), episode=episode)
            trajectories = [result] if isinstance(result, Trajectory) else list(result or [])
            if not trajectories:
                raise RejectedPrompt("empty", "the workflow returned nothing")
            return trajectories

        rounds = math.ceil(len(order) / (rollout.max_concurrent_rollouts or len(order)))
        result = self.loop.run(
            evaluate(
                [partial(run, *place) for place in order],
                episode_timeout=rollout.episode_timeout,
                max_concurrent=rollout.max_concurrent_rollouts,
                on_live_change=self._set_live,
            ),
            timeout=rounds * rollout.episode_timeout + 60,
            what=f"the evaluation at version {version}",
        )
        return result.metrics()
