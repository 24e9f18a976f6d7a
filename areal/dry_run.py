"""``--dry-run``: what a recipe would run, in prompts, samples, steps, tokens and memory, without running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from archon.models.config import ModelConfig
from archon.parallel.fit import LayoutMisfit, check_fit
from archon.plan import COMPUTE_BYTES, MemoryPlan, count_parameters, kv_bytes_per_token, plan_memory
from areal.config import Config, ConfigError, blame
from areal.training import engine_options

DEFAULT_KV_BYTES = 2**28
"""Cache of the embedded engine where the recipe does not size it."""

_ROWS_MEASURED = 256
"""Prompts whose tokens are counted; more would only cost time."""


@dataclass(frozen=True)
class DryRun:
    """Counts are per training step unless they say otherwise; tokens are upper bounds.

    Attributes:
        prompts, samples: what a step trains.
        steps, steps_per_epoch: training steps of the run and of one pass over the data.
        updates: optimizer updates of the whole run.
        longest_prompt: tokens, among the measured prompts.
        tokens: prompt and completion, of all samples.
        micro_batches: forward and backward passes.
        tokens_per_micro_batch: of the largest.
        model_parameters: of the policy.
        memory: bytes.
    """

    prompts: int
    samples: int
    steps: int
    steps_per_epoch: int
    updates: int
    longest_prompt: int
    tokens: int
    micro_batches: int
    tokens_per_micro_batch: int
    model_parameters: int
    memory: MemoryPlan


def plan(config: Config, model: ModelConfig, dataset_rows: int, prompt_lengths: Sequence[int]) -> DryRun:
    """The numbers of a run.

    Args:
        config: the recipe.
        model: shape of the policy.
        dataset_rows: prompts of one epoch.
        prompt_lengths: tokens of some prompts, at least one.
    """
    actor, gconfig, rollout, batch_size = config.actor, config.gconfig, config.rollout, config.train_dataset.batch_size
    prompts = min(batch_size, dataset_rows)
    samples = prompts * gconfig.n_samples
    steps = min(config.total_train_steps or math.inf, math.ceil(dataset_rows * config.total_train_epochs / batch_size))
    minibatches = min(actor.ppo_n_minibatches, samples)

    positions = rollout.max_model_len or model.max_position_embeddings
    limit = min(positions, gconfig.max_tokens or positions)
    lengths = [min(length + gconfig.max_new_tokens, limit) for length in prompt_lengths]
    tokens = math.ceil(samples * sum(lengths) / len(lengths))
    budget = max(actor.mb_spec.max_tokens_per_mb, *lengths)
    micro_batches = minibatches * math.ceil(samples / minibatches / (budget // max(lengths)))

    cached = DEFAULT_KV_BYTES // kv_bytes_per_token(model, COMPUTE_BYTES[actor.dtype])
    return DryRun(
        prompts=prompts,
        samples=samples,
        steps=int(steps),
        steps_per_epoch=math.ceil(dataset_rows / batch_size),
        updates=int(steps) * minibatches,
        longest_prompt=max(prompt_lengths),
        tokens=tokens,
        micro_batches=micro_batches,
        tokens_per_micro_batch=min(budget, tokens),
        model_parameters=count_parameters(model),
        memory=plan_memory(
            model,
            dtype=actor.dtype,
            optimizer=actor.optimizer.type,
            tokens_per_mb=min(budget, tokens),
            recompute=engine_options(actor).ac_mode == "full",
            kv_cache_tokens=rollout.kv_cache_tokens or max(positions, cached),
        ),
    )


def print_dry_run(config: Config) -> None:
    """Load the model's shape, the tokenizer and the prompts, and print what the recipe would run."""
    from rich.console import Console
    from rich.table import Table

    shape, rows, lengths = _measure(config)
    found = plan(config, shape, rows, lengths)
    console = Console(highlight=False)
    ranks = config.actor.layout.world_size
    memory = "memory (estimate)"
    if ranks > 1:
        memory = f"memory (estimate for one process; {ranks} ranks share the trainer's)"
    for title, entries in (("run", _counts(config, found)), (memory, _memory(found.memory))):
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(style="dim")
        for name, value, note in entries:
            table.add_row(name, value, note)
        console.print(table)


def _measure(config: Config) -> tuple[ModelConfig, int, list[int]]:
    """The policy's shape, the number of prompts, and the tokens of the first of them."""
    from areal.datasets import DatasetError, load
    from areal.models import ModelNotFound, load_tokenizer, render, resolve_model

    path, section, cache = config.actor.path, config.train_dataset, config.run_dir / "models"
    with blame("actor.path", path, ModelNotFound):
        folder = resolve_model(path, cache)
    with blame("actor.path", path, FileNotFoundError, ValueError):
        shape = ModelConfig.from_folder(folder)
    with blame("actor.backend", config.actor.backend, LayoutMisfit):
        check_fit(config.actor.layout, shape, engine_options(config.actor))
    with blame("tokenizer_path", config.tokenizer_path, ModelNotFound):
        tokenizer = load_tokenizer(
            folder if config.tokenizer_path == path else resolve_model(config.tokenizer_path, cache)
        )
    with blame("train_dataset.path", section.path, DatasetError):
        rows = load(section.path, section.split, dataset_kwargs=section.dataset_kwargs).rows
    measured = [len(render(tokenizer, row["messages"])) for row in rows[:_ROWS_MEASURED]]
    lengths = [length for length in measured if length <= (section.max_length or length)]
    if not lengths:
        raise ConfigError(
            f"train_dataset.max_length = {section.max_length}: every measured prompt is longer, the shortest of "
            f"{min(measured)} tokens"
        )
    return shape, len(rows), lengths


def _counts(config: Config, found: DryRun) -> list[tuple[str, str, str]]:
    gconfig, actor = config.gconfig, config.actor
    return [
        ("model parameters", f"{found.model_parameters:,}", config.actor.path),
        ("training steps", f"{found.steps:,}", f"{found.steps_per_epoch:,} an epoch"),
        ("optimizer updates", f"{found.updates:,}", f"{actor.ppo_n_minibatches} a step"),
        ("prompts per step", f"{found.prompts:,}", ""),
        ("samples per step", f"{found.samples:,}", f"{gconfig.n_samples} for each prompt"),
        (
            "tokens per step",
            f"{found.tokens:,}",
            f"at most: prompts of up to {found.longest_prompt}, completions of up to {gconfig.max_new_tokens}",
        ),
        ("micro-batches per step", f"{found.micro_batches:,}", f"at most, of {found.tokens_per_micro_batch:,} tokens"),
        ("tokens in all", f"{found.tokens * found.steps:,}", "at most"),
    ]


def _memory(memory: MemoryPlan) -> list[tuple[str, str, str]]:
    notes = {
        "parameters": "fp32",
        "gradients": "fp32",
        "optimizer": "fp32 states",
        "compute_copy": "parameters in the compute dtype",
        "activations": "of one micro-batch",
        "lm_head": "tiles of logits, gradient of the head",
        "engine_weights": "the rollout engine's own",
        "staged_weights": "the next version, on its way to the engine",
        "kv_cache": "of the rollout engine",
    }
    rows = [(name.replace("_", " "), gibibytes(getattr(memory, name)), note) for name, note in notes.items()]
    rows = [row for row in rows if not row[1].startswith("0.0 ")]
    return [*rows, ("together", gibibytes(memory.total), "on top of Python and its libraries")]


def gibibytes(size: int) -> str:
    """``1.25 GiB``, or ``340 MiB`` below one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
