"""What every layout must reproduce: models, batches and losses, and everything that an engine makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tiny_models import build, relative_error
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import archon
from archon.batch import PackedBatch
from archon.losses import Loss, TokenOutputs
from archon.training_state import training_state
from archon.weights import SCORE, named_weights, save_folder

LENGTHS = (1, 2, 37, 5, 64, 13, 20, 90, 8, 3, 41)
STEPS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "qwen2"},
    "normed": {"family": "qwen3"},
    "tied": {"family": "llama", "tied": True},
    "moe": {"family": "qwen3_moe", "mlp_only_layers": []},
    "dense_first": {"family": "qwen3_moe", "mlp_only_layers": [0]},
    "few_heads": {"family": "qwen3", "num_attention_heads": 4},
    "deep_tied": {"family": "llama", "tied": True, "num_hidden_layers": 6},
    "dense_inside": {"family": "qwen3_moe", "num_hidden_layers": 6, "mlp_only_layers": [2]},
}
CLEAR = 3e-4
"""Margin in probability by which a chosen expert beats the next one, so that rounding never changes the choice."""


def make_folder(name: str, parent: Path, is_critic: bool = False) -> Path:
    """A Hugging Face folder of one of ``MODELS``, or of a critic of its shape."""
    folder = parent / (f"{name}_critic" if is_critic else name)
    model = build(**{**SHAPE, **MODELS[name]})
    score = torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    save_folder(folder, [*named_weights(model), *([(SCORE, score)] if is_critic else [])], model.config.to_dict())
    return folder


def make_batch(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        mask = torch.rand(length, generator=generator) < 0.6
        mask[0] = False
        rows.append(
            {
                "input_ids": torch.randint(SHAPE["vocab_size"], (length,), generator=generator),
                "loss_mask": mask,
                "advantages": torch.randn(length, generator=generator),
                "temperature": 0.7 + 0.1 * (length % 5),
            }
        )
    return PackedBatch.from_sequences(rows, sequence_columns=("temperature",))


def make_clear_batch(engine: archon.Engine, seed: int, lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    """``make_batch`` with other tokens wherever the router of a one-rank engine is close to another choice."""
    batch = make_batch(seed, lengths)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(200):
        close = choice_margins(engine, batch) < CLEAR
        if not close.any():
            return batch
        others = torch.randint(SHAPE["vocab_size"], close.shape, generator=generator)
        batch = replace(batch, input_ids=torch.where(close, others, batch.input_ids))
    raise AssertionError(f"no batch of lengths {lengths} has expert choices with a margin of {CLEAR}")


def choice_margins(engine: archon.Engine, batch: PackedBatch) -> Tensor:
    """``[T]`` smallest lead over all layers, in probability (and balance bias), of the last expert that a router chose.

    The engine has one rank and takes the batch in one micro-batch.
    """
    margins = torch.full((batch.num_tokens,), torch.inf)
    if engine.routers is None:
        return margins
    top_k = engine.routers.moe.experts_per_token

    def look(router: nn.Module, _: Any, logits_TE: Tensor) -> None:
        scores = logits_TE.softmax(-1)
        if isinstance(router.e_score_correction_bias, Tensor):
            scores = scores + router.e_score_correction_bias
        best = scores.topk(top_k + 1).values
        margins.copy_(torch.minimum(margins, best[:, -2] - best[:, -1]))

    handles = [block.gate.register_forward_hook(look) for block in engine.routers.blocks.values()]
    try:
        engine.forward(batch, ("values",) if engine.model.is_critic else ("logprobs",))
    finally:
        for handle in handles:
            handle.remove()
    return margins


class PolicyLoss:
    """Log-prob times advantage, less some entropy: a mean over the tokens under the mask."""

    outputs: tuple[str, ...] = ("logprobs", "entropy")

    def prepare(self, batch: PackedBatch) -> PackedBatch:
        return batch

    def denominator(self, batch: PackedBatch) -> Tensor:
        return batch.loss_mask.sum(dtype=torch.float64)

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> Loss:
        assert outputs.logprobs is not None and outputs.entropy is not None
        per_token = -batch["advantages"] * outputs.logprobs - 0.1 * outputs.entropy
        count = batch.loss_mask.sum()
        return Loss(
            torch.where(batch.loss_mask, per_token, 0.0).sum(),
            {
                "entropy": (outputs.entropy.detach().sum(), count),
                "sequences": (torch.tensor(batch.num_sequences), count),
            },
        )


class ValueLoss(PolicyLoss):
    """Squared error of values, and of the last value of each sequence."""

    outputs = ("values", "last_value")

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> Loss:
        assert outputs.values is not None and outputs.last_value is not None
        error = torch.where(batch.loss_mask, (outputs.values - batch["advantages"]).square(), 0.0)
        last = (outputs.last_value - 1.0).square().sum()
        return Loss(error.sum() + last, {"values": (outputs.values.detach().sum(), batch.num_tokens)})


@dataclass(frozen=True)
class Case:
    """One layout of one model.

    Attributes:
        layout: as written.
        model: one of ``MODELS``.
        options: of the engine.
        budget: tokens of a micro-batch.
        is_critic: values instead of log-probs.
        lengths: of the sequences.
        dtype: of the computation.
        replay: routers take the choices that one fp32 process made.
    """

    layout: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    budget: int = 100
    is_critic: bool = False
    lengths: tuple[int, ...] = LENGTHS
    dtype: Literal["float32", "bfloat16"] = "float32"
    replay: bool = False

    @property
    def id(self) -> str:
        words = [str(value) for value in self.options.values()]
        if self.is_critic:
            words.append("critic")
        if self.lengths != LENGTHS:
            words.append(f"{len(self.lengths)}seqs")
        if self.budget != Case.budget:
            words.append(f"budget{self.budget}")
        if self.dtype != Case.dtype:
            words.append(self.dtype)
        if self.replay:
            words.append("replay")
        return "-".join(["layout", self.layout, self.model, *words])

    @property
    def world_size(self) -> int:
        return archon.Layout.parse(self.layout).world_size

    @property
    def on_one_rank(self) -> Case:
        """What this layout must reproduce: one process, one micro-batch, no option but those that change learning."""
        options = {name: value for name, value in self.options.items() if name.startswith("moe_")}
        return replace(self, layout="d1", options=options, budget=sum(self.lengths), dtype="float32")


@dataclass
class Observed:
    """Everything that must not depend on the layout."""

    metrics: list[dict[str, float]]
    columns: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def make_engine(folder: Path, case: Case, **changes: Any) -> archon.Engine:
    """The engine of a case on this rank; ``changes`` are to the arguments of ``from_pretrained``."""
    arguments: dict[str, Any] = {
        "layout": case.layout,
        "optimizer": archon.OptimizerConfig(lr=1e-4, eps=1e-6, weight_decay=0.01),
        "dtype": case.dtype,
        "device": "cpu",
        "max_tokens_per_mb": case.budget,
        "options": archon.Options(**case.options),
        "is_critic": case.is_critic,
    }
    return archon.Engine.from_pretrained(folder, **{**arguments, **changes})


def observe(
    folder: Path,
    case: Case,
    batches: Sequence[PackedBatch] | None = None,
    change: Callable[[archon.Engine], None] | None = None,
) -> Observed:
    """Train a few steps, then score a batch. Every rank of the layout calls it.

    Args:
        batches: one for each step and the last to score; None takes those of ``make_batch``.
        change: what happens to the engine before.
    """
    batches = batches or [make_batch(seed, case.lengths) for seed in range(STEPS + 1)]
    engine = make_engine(folder, case)
    if change is not None:
        change(engine)
    return _observed(engine, case, lambda step: batches[step])


def observe_clearly(folder: Path, case: Case) -> tuple[Observed, list[PackedBatch]]:
    """What one process observes on batches in which no expert choice is close, and the batches."""
    engine = make_engine(folder, case)
    batches: list[PackedBatch] = []

    def draw(step: int) -> PackedBatch:
        batch = make_clear_batch(engine, step, case.lengths)
        if case.replay:
            batch = batch.with_tokens(routed_experts=engine.forward(batch, ("routed_experts",)).routed_experts)
        batches.append(batch)
        return batch

    return _observed(engine, case, draw), batches


def _observed(engine: archon.Engine, case: Case, batch_of: Callable[[int], PackedBatch]) -> Observed:
    loss = ValueLoss() if case.is_critic else PolicyLoss()
    metrics, gradients = [], {}
    for step in range(STEPS):
        metrics.append(engine.train_step(batch_of(step), loss))
        if step == 0:
            gradients = gathered_moments(engine)
    outputs = engine.forward(batch_of(STEPS), loss.outputs)
    columns = {name: getattr(outputs, name) for name in loss.outputs}
    return Observed(metrics, columns, gradients, {name: tensor.clone() for name, tensor in engine.weights()})


def gathered_moments(engine: archon.Engine) -> dict[str, Tensor]:
    """First moments of Adam, whole, by name: after one step they are 0.1 times the clipped gradient."""
    assert engine.optimizer is not None
    state = training_state(engine.model.parts.values(), engine.optimizer)
    return {
        name.removeprefix("optimizer.exp_avg."): (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in state.items()
        if name.startswith("optimizer.exp_avg.")
    }


def merged(results: list[Observed]) -> Observed:
    """What the ranks saw together, after checking that they agree where they must."""
    first = results[0]
    for rank, other in enumerate(results):
        assert other.metrics == first.metrics, f"rank {rank} reports other metrics than rank 0"
        assert all(torch.equal(other.columns[name], column) for name, column in first.columns.items())
        assert all(torch.equal(other.weights[name], tensor) for name, tensor in first.weights.items())
        first.gradients = other.gradients | first.gradients
    return first


def assert_same(found: Observed, expected: Observed) -> None:
    """Within the tolerances of the contracts, in fp32."""
    for step, (ours, theirs) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"micro_batches"}:
            tolerance = 1e-6 if name == "loss" else 1e-5
            gap = abs(ours[name] - theirs[name])
            assert gap <= tolerance * max(1.0, abs(theirs[name])), (step, name, ours[name], theirs[name])
    for name, column in expected.columns.items():
        size = max(1.0, float(column.abs().max())) if name in ValueLoss.outputs else 1.0  # values have any scale
        assert (found.columns[name] - column).abs().max() <= 1e-5 * size, name
    for kind in ("gradients", "weights"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        for name, tensor in theirs.items():
            assert relative_error(ours[name], tensor) <= 1e-5, (kind, name, relative_error(ours[name], tensor))


def assert_same_in_bf16(found: Observed, expected: Observed) -> None:
    """The gradient of the first step in bf16 against that of fp32, within the tolerance of the contracts.

    Single tensors may differ by more: in one process too, a norm weight of 8 numbers rounds by up to 6e-2.
    """
    loss, right = found.metrics[0]["loss"], expected.metrics[0]["loss"]
    assert abs(loss - right) <= 1e-2 * max(1.0, abs(right)), (loss, right)
    assert found.gradients.keys() == expected.gradients.keys()
    assert relative_error(flattened(found.gradients), flattened(expected.gradients)) <= 3e-2
    for name, tensor in expected.gradients.items():
        assert relative_error(found.gradients[name], tensor) <= 8e-2, name


def flattened(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])
