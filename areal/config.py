"""The schema of a run: every key, its type, its default, and what may not be combined."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from archon.layout import Layout, parse_backend
from areal.config_loader import ConfigError, blame, load_object, load_tree, resolved_yaml, validate

__all__ = ["Config", "ConfigError", "blame", "load_config", "load_object", "resolved_yaml"]

IMPORT_PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"
FOLDER_NAME = r"^[\w][\w.\-]*$"
TOP_K_OFF = 10**8
"""What AReaL's recipes write for "no top-k"; 0 here."""


class Section(BaseModel):
    """Part of the configuration: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


def _layout_of(backend: str, engine: str) -> Layout:
    """The layout of a backend, if it names this engine."""
    name, layout = parse_backend(backend)
    if name != engine:
        raise ValueError(f"the engine here is {engine!r}, not {name!r}: write {engine}:d1")
    return layout


class ClusterConfig(Section):
    """``fileroot``: the folder that holds all runs."""

    fileroot: str = Field("runs", min_length=1)


class SchedulerConfig(Section):
    """``type``: ``inline`` runs the rollouts in this process, and the trainer too where its layout has one rank."""

    type: Literal["inline"] = "inline"


class MicroBatchSpec(Section):
    """``max_tokens_per_mb``: token budget of a micro-batch; the longest sequence raises it."""

    max_tokens_per_mb: int = Field(4096, gt=0)


class OptimizerConfig(Section):
    """AdamW (``adam``) or SGD, its schedule and clipping; ``gradient_clipping: 0`` turns clipping off.

    Warm-up takes ``warmup_steps``, or ``warmup_steps_proportion`` of all steps where that is null.
    """

    type: Literal["adam", "sgd"] = "adam"
    lr: float = Field(1e-5, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    warmup_steps_proportion: float = Field(0.001, ge=0, le=1)
    warmup_steps: int | None = Field(None, ge=0)
    gradient_clipping: float = Field(1.0, ge=0)


class NormConfig(Section):
    """How rewards or advantages are normalised: over the batch, over the prompt's group, or (null) not at all."""

    mean_level: Literal["batch", "group"] | None = "batch"
    std_level: Literal["batch", "group"] | None = "batch"
    mean_leave1out: bool = False
    std_unbiased: bool = True
    eps: float = Field(1e-5, ge=0)

    @model_validator(mode="after")
    def _leave_one_out_needs_a_mean(self) -> NormConfig:
        if self.mean_leave1out and self.mean_level is None:
            raise ValueError("mean_leave1out leaves one out of a mean, and mean_level is null: set mean_level")
        return self

    def uses_groups(self) -> bool:
        return "group" in (self.mean_level, self.std_level)


class RejectionSamplingConfig(Section):
    """Which off-policy tokens or sequences train, by a metric of proximal against behaviour log-probs, and within what
    bounds; ``upper`` is 5.0, and 0.1 for ``binary_kl`` (KPop)."""

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = "ratio"
    agg: Literal["sum", "mean", "max"] = "mean"
    lower: float | None = None
    upper: float = 5.0

    @model_validator(mode="before")
    @classmethod
    def _upper_of_binary_kl(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("metric") == "binary_kl":
            return {"upper": 0.1} | data
        return data

    @model_validator(mode="after")
    def _bounds(self) -> RejectionSamplingConfig:
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(f"lower {self.lower} is above upper {self.upper}: nothing would be kept")
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(f"action clamp bounds the weight itself, so it needs metric: ratio, not {self.metric}")
        if self.metric == "binary_kl" and self.upper > 1:
            warnings.warn(
                f"actor.rejection_sampling.upper = {self.upper}: above 1, binary_kl masks almost nothing; 0.1 is usual",
                stacklevel=2,
            )
        return self


class ArchonConfig(Section):
    """How the layout of the actor runs; see ``archon.Options`` for what each key means.

    ``ac_mode``: what ``gradient_checkpointing: true`` recomputes; it does nothing without it. ``enable_compile``: each
    layer by torch's default compiler.
    """

    context: Literal["ulysses", "ring"] = "ulysses"
    pp_schedule: Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] = "1F1B"
    pp_layers_per_stage: int | None = Field(None, gt=0)
    pp_first_stage_less_layers: int = Field(1, ge=0)
    pp_last_stage_less_layers: int = Field(1, ge=0)
    reshard_after_forward_policy: Literal["default", "always", "never"] = "default"
    offload_params: bool = False
    ac_mode: Literal["none", "full", "selective", "memory_budget"] = "full"
    selective_ac_option: Literal["op"] | int = "op"
    ac_memory_budget: float = Field(0.5, ge=0, le=1)
    enable_compile: bool = False
    use_deterministic_algorithms: bool = False
    moe_aux_loss_coeff: float = Field(0.0, ge=0)
    moe_z_loss_coeff: float = Field(0.0, ge=0)


class ActorConfig(Section):
    """The model being trained, its optimizer, and the policy loss.

    ``backend``: the layout; with more than one rank the actor trains in as many processes of this machine.
    ``request_timeout``: seconds that one call to them may take before it is ended with what each was doing.
    ``overlong_*`` lower the reward linearly, by at most ``overlong_penalty_factor``, over the last
    ``overlong_tokens`` of the completion budget. ``rejection_sampling: null`` keeps every token.
    """

    path: str = Field(min_length=1, description="a Hugging Face folder, a hub id, or package:NAME")
    init_from_scratch: bool = False
    backend: str = "archon:d1"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    gradient_checkpointing: bool = False
    archon: ArchonConfig = ArchonConfig()
    mb_spec: MicroBatchSpec = MicroBatchSpec()
    optimizer: OptimizerConfig = OptimizerConfig()
    ppo_n_minibatches: int = Field(1, gt=0)
    eps_clip: float = Field(0.2, gt=0, le=1)
    eps_clip_higher: float | None = Field(None, gt=0)
    c_clip: float | None = Field(None, gt=1)
    reward_norm: NormConfig | None = NormConfig(mean_level="group", std_level="group")
    adv_norm: NormConfig | None = None
    reward_scaling: float = Field(1.0, gt=0)
    reward_bias: float = 0.0
    reward_clip: float = Field(20.0, gt=0)
    overlong_reward_penalty: bool = False
    overlong_tokens: int | None = Field(None, gt=0)
    overlong_penalty_factor: float | None = Field(None, gt=0)
    mask_no_eos_with_zero: bool = False
    discount: float = Field(1.0, ge=0, le=1)
    gae_lambda: float = Field(1.0, ge=0, le=1)
    use_decoupled_loss: bool = True
    prox_logp_method: Literal["recompute", "loglinear", "reuse"] = "recompute"
    rejection_sampling: RejectionSamplingConfig | None = None
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    entropy_coef: float = Field(0.0, ge=0)
    weight_update_mode: Literal["memory", "disk"] = "memory"
    request_timeout: float = Field(3600.0, gt=0)

    @field_validator("backend")
    @classmethod
    def _archon_layout(cls, backend: str) -> str:
        assert _layout_of(backend, "archon")
        return backend

    @property
    def layout(self) -> Layout:
        return _layout_of(self.backend, "archon")


class GenerationConfig(Section):
    """How completions are sampled.

    ``n_samples`` completions a prompt, of at most ``max_new_tokens`` each and at most ``max_tokens`` with the prompt
    (null: what the model can hold). ``top_k: 0`` and ``top_p: 1`` keep every token. ``stop``: strings that end it.
    """

    n_samples: int = Field(8, gt=0)
    max_new_tokens: int = Field(256, gt=0)
    max_tokens: int | None = Field(None, gt=1)
    greedy: bool = False
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stop_token_ids: list[int] = []
    stop: list[str] = []

    @field_validator("top_k", mode="before")
    @classmethod
    def _top_k_off(cls, top_k: Any) -> Any:
        is_number = isinstance(top_k, int | float) and not isinstance(top_k, bool)
        return 0 if is_number and top_k >= TOP_K_OFF else top_k

    @field_validator("temperature", mode="before")
    @classmethod
    def _no_zero_temperature(cls, temperature: Any) -> Any:
        if temperature == 0 and not isinstance(temperature, bool):
            raise ValueError("no distribution has temperature 0: set greedy: true to take the likeliest token")
        return temperature


class RolloutConfig(Section):
    """Where and how episodes run. Timeouts are in seconds.

    ``max_head_offpolicyness``: versions a trained token may be old; 0 is synchronous. ``max_concurrent_rollouts``:
    episodes at once; null runs all that are admitted. ``num_threads``: of the embedded engine; null divides the cores.
    ``kv_cache_tokens``: room of its cache; null takes 256 MiB. ``max_model_len``: null is the model's.
    """

    backend: str = "embedded:d1"
    max_concurrent_rollouts: int | None = Field(None, gt=0)
    max_head_offpolicyness: int = Field(0, ge=0)
    deterministic_sampling: bool = False
    episode_timeout: float = Field(600.0, gt=0)
    max_attempts: int = Field(3, gt=0)
    reward_workers: int = Field(2, gt=0)
    reward_timeout: float = Field(15.0, gt=0)
    setup_timeout: float = Field(300.0, gt=0)
    num_threads: int | None = Field(None, gt=0)
    max_model_len: int | None = Field(None, gt=1)
    kv_cache_tokens: int | None = Field(None, gt=0)

    @field_validator("backend")
    @classmethod
    def _one_embedded_engine(cls, backend: str) -> str:
        if (layout := _layout_of(backend, "embedded")).world_size != 1:
            raise ValueError(
                f"layout {layout} needs {layout.world_size} processes, and the embedded engine runs in one: "
                "write embedded:d1"
            )
        return backend


class DatasetConfig(Section):
    """Rows of one split: see ``areal.datasets.load`` for what ``path`` and ``dataset_kwargs`` may be."""

    path: str = Field(min_length=1, description="reasoning_gym/<task>, a file, a folder or a hub id")
    split: str = Field("train", min_length=1)
    dataset_kwargs: dict[str, Any] = {}


class PromptDatasetConfig(DatasetConfig):
    """Rows that become prompts. ``max_length``: tokens of a prompt; longer ones are rejected by name."""

    max_length: int | None = Field(None, gt=0)


class TrainDatasetConfig(PromptDatasetConfig):
    """``batch_size``: prompts a step; each gives ``gconfig.n_samples`` samples."""

    batch_size: int = Field(8, gt=0)
    shuffle: bool = True


class ValidDatasetConfig(PromptDatasetConfig):
    """Held-out prompts, which no training step sees. ``reward_fn`` may be stricter than the one that trains; null: the
    same."""

    split: str = Field("test", min_length=1)
    reward_fn: str | None = Field(None, pattern=IMPORT_PATH)


class WarmStartConfig(Section):
    """Supervised steps on (prompt, answer) rows before the first RL step; ``dataset: null`` takes the train dataset.

    ``target_loss``: ends the warm start before ``steps`` once the loss (nats per token) has come down to it.
    """

    steps: int = Field(75, gt=0)
    batch_size: int = Field(128, gt=0)
    lr: float = Field(2e-3, gt=0)
    target_loss: float | None = Field(None, gt=0)
    dataset: DatasetConfig | None = None


class TimerConfig(Section):
    """Something happens every so many epochs, steps or seconds, whichever comes first; all null: never."""

    freq_epochs: int | None = Field(None, gt=0)
    freq_steps: int | None = Field(None, gt=0)
    freq_secs: float | None = Field(None, gt=0)


class EvaluatorConfig(TimerConfig):
    """Held-out evaluation; ``eval_before_train`` measures the model before the first RL step."""

    eval_before_train: bool = True


class RecoverConfig(TimerConfig):
    """Training-state checkpoints, and whether the same command resumes: ``auto`` (``on``) or ``off`` (``disabled``)."""

    mode: Literal["off", "auto"] = "auto"
    freq_steps: int | None = Field(10, gt=0)

    @field_validator("mode", mode="before")
    @classmethod
    def _spellings(cls, mode: Any) -> Any:
        if isinstance(mode, bool):  # what YAML makes of a bare on or off
            return "auto" if mode else "off"
        return {"disabled": "off", "on": "auto"}.get(mode, mode) if isinstance(mode, str) else mode


class TensorBoardConfig(Section):
    """``path``: null writes into the run's ``tensorboard/``."""

    path: str | None = Field(None, min_length=1)


class StatsLoggerConfig(Section):
    tensorboard: TensorBoardConfig = TensorBoardConfig()


class Config(Section):
    """One run. Only ``experiment_name``, ``actor.path`` and ``train_dataset.path`` have no default.

    ``tokenizer_path`` defaults to ``actor.path``. What ``eval_gconfig`` leaves out it takes from ``gconfig``, with one
    sample a prompt. ``dynamic_bs``: groups that ``dynamic_filter_fn`` rejects shrink the batch instead of being
    replaced. ``reward_fn: null`` takes the dataset's own reward.
    """

    experiment_name: str = Field(pattern=FOLDER_NAME, description="the folder of the run below cluster.fileroot")
    trial_name: str = Field("trial0", pattern=FOLDER_NAME)
    seed: int = Field(1, ge=0)
    total_train_epochs: int = Field(1, gt=0)
    total_train_steps: int | None = Field(None, gt=0)
    cluster: ClusterConfig = ClusterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    actor: ActorConfig
    tokenizer_path: str = ""
    gconfig: GenerationConfig = GenerationConfig()
    eval_gconfig: GenerationConfig = Field(None, validate_default=True)
    rollout: RolloutConfig = RolloutConfig()
    workflow: str = Field("areal.workflows.RLVRWorkflow", pattern=IMPORT_PATH)
    workflow_kwargs: dict[str, Any] = {}
    reward_fn: str | None = Field(None, pattern=IMPORT_PATH)
    dynamic_filter_fn: str | None = Field(None, pattern=IMPORT_PATH)
    dynamic_bs: bool = False
    train_dataset: TrainDatasetConfig
    valid_dataset: ValidDatasetConfig | None = None
    warm_start: WarmStartConfig | None = None
    saver: TimerConfig = TimerConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    recover: RecoverConfig = RecoverConfig()
    stats_logger: StatsLoggerConfig = StatsLoggerConfig()

    @property
    def run_dir(self) -> Path:
        """The one folder this run writes into."""
        return Path(self.cluster.fileroot) / self.experiment_name / self.trial_name

    @field_validator("tokenizer_path")
    @classmethod
    def _tokenizer_of_the_actor(cls, path: str, info: ValidationInfo) -> str:
        return path or (info.data["actor"].path if "actor" in info.data else path)

    @field_validator("eval_gconfig", mode="before")
    @classmethod
    def _copy_of_gconfig(cls, given: Any, info: ValidationInfo) -> Any:
        if not (given is None or isinstance(given, dict)):
            return given
        base = info.data["gconfig"].model_dump() if "gconfig" in info.data else {}
        return base | {"n_samples": 1} | (given or {})

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        if problems := list(_conflicts(self)):
            raise ValueError("\n".join(problems))
        return self


def _conflicts(config: Config) -> list[str]:
    """One sentence for each pair of settings that cannot go together."""
    actor, gconfig, rollout, found = config.actor, config.gconfig, config.rollout, []
    for key, norm in (("reward_norm", actor.reward_norm), ("adv_norm", actor.adv_norm)):
        if norm and norm.uses_groups() and gconfig.n_samples == 1:
            found.append(
                f"gconfig.n_samples = 1: actor.{key} compares the samples of a prompt with each other, and one sample "
                f"always gets 0; use n_samples of 2 or more, or actor.{key} levels batch or null"
            )
    if actor.archon.ac_mode not in ("full", "none") and not actor.gradient_checkpointing:
        found.append(
            f"actor.archon.ac_mode = {actor.archon.ac_mode!r}: nothing is recomputed without "
            "actor.gradient_checkpointing: true; set it, or leave ac_mode out"
        )
    if actor.prox_logp_method == "reuse" and actor.ppo_n_minibatches != 1:
        found.append(
            f"actor.ppo_n_minibatches = {actor.ppo_n_minibatches}: actor.prox_logp_method 'reuse' takes the log-probs "
            "of the only update of a step; use 1 mini-batch, or prox_logp_method recompute"
        )
    if actor.rejection_sampling and not actor.use_decoupled_loss:
        found.append(
            "actor.use_decoupled_loss = False: actor.rejection_sampling shapes the weight that only the decoupled loss "
            "has; set use_decoupled_loss: true, or rejection_sampling: null"
        )
    if actor.overlong_reward_penalty:
        for key in ("overlong_tokens", "overlong_penalty_factor"):
            if getattr(actor, key) is None:
                found.append(f"actor.{key} = None: actor.overlong_reward_penalty needs a number here")
        if (actor.overlong_tokens or 0) > gconfig.max_new_tokens:
            found.append(
                f"actor.overlong_tokens = {actor.overlong_tokens}: must not exceed gconfig.max_new_tokens "
                f"({gconfig.max_new_tokens}), whose last tokens it penalises"
            )
    if (rollout.max_concurrent_rollouts or gconfig.n_samples) < gconfig.n_samples:
        found.append(
            f"rollout.max_concurrent_rollouts = {rollout.max_concurrent_rollouts}: the gconfig.n_samples "
            f"({gconfig.n_samples}) episodes of one prompt run together; allow at least that many"
        )
    if rollout.deterministic_sampling and rollout.max_head_offpolicyness:
        found.append(
            f"rollout.max_head_offpolicyness = {rollout.max_head_offpolicyness}: rollout.deterministic_sampling fixes "
            "which version samples what, so it needs 0"
        )
    return found


def load_config(source: str | Path | dict[str, Any], overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a recipe (a YAML file, or its content as a dict), apply ``key=value`` overrides, and check everything.

    A file may name one ``base:`` file, relative to itself, that it refines. ``${other.key}`` refers to any key,
    defaults included.

    Raises:
        ConfigError: with every problem found: key, value, what was expected, and the nearest known key.
    """
    return validate(Config, load_tree(Config, source, overrides))
