"""What no layout, no budget of a micro-batch and no way to run may change, and what one rank must tell the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from layout_cases import (
    STEPS,
    Case,
    Observed,
    PolicyLoss,
    assert_same,
    make_batch,
    make_engine,
    make_folder,
    merged,
    observe,
    observe_clearly,
)
from rank_pool import RankPool
from torch import Tensor

import archon
from archon.batch import PackedBatch
from archon.losses import Loss, TokenOutputs
from archon.models.config import ModelConfig
from archon.optim import local_shard
from archon.parallel.fit import LayoutMisfit, check_fit
from archon.report import StepReport

Reference = tuple[Observed, list[PackedBatch]]

LENGTHS = (1, 2, 37, 5, 64, 13, 20)
FEW = (37, 3, 20)
ZBV = {"pp_schedule": "ZBVZeroBubble"}
BALANCED = {"moe_router_bias_update_rate": 0.01}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {model: make_folder(model, parent) for model in ("dense", "tied", "moe", "dense_first", "dense_inside")}


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, folders: dict[str, Path]) -> Callable[[str], Reference]:
    """What one process observes of a model without any option, and its batches."""
    known: dict[str, Reference] = {}

    def observed(model: str) -> Reference:
        if model not in known:
            case = Case("d1", model, lengths=LENGTHS).on_one_rank
            (known[model],) = ranks.run(observe_clearly, 1, folders[model], case)
        return known[model]

    return observed


# --- Sums and counts


@dataclass
class Counted:
    """What one step summed up: (sum, count) of every metric over all ranks, its metrics, and tokens by expert."""

    sums: dict[str, tuple[float, float]]
    metrics: dict[str, float]
    experts: Tensor
    chosen: Tensor


def count(folder: Path, case: Case, batch: PackedBatch) -> Counted:
    engine = make_engine(folder, case)
    assert engine.routers is not None
    chosen = engine.forward(batch, ("routed_experts",)).routed_experts
    assert chosen is not None
    sums: dict[str, tuple[float, float]] = {}
    experts: list[Tensor] = []
    metrics_of, start = StepReport.metrics, engine.routers._start

    def metrics(report: StepReport) -> dict[str, float]:
        sums.update(report.sums)
        return metrics_of(report)

    def forget() -> None:
        experts.append(engine.routers.counts.clone())
        start()

    StepReport.metrics, engine.routers._start = metrics, forget  # a rank lives for one run
    found = engine.train_step(batch, PolicyLoss())
    return Counted(sums, found, experts[0], chosen)


COUNTED = [
    *(Case("d1", "dense_first", budget=budget) for budget in (64, 100, 1000)),
    Case("c2", "dense_first"),
    Case("c4", "dense_first", {"context": "ring"}),
    Case("d4e2", "dense_first", budget=64),  # two micro-batches on one rank, and filler beside the second
    Case("t2", "dense_first", budget=64),
    Case("p2", "dense_first", ZBV, budget=64),
    Case("d2p2", "dense_first"),
    Case("(attn:d2|ffn:t2)", "dense_first", budget=64),
]


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.id)
def test_layout_changes_no_loss_and_no_count_and_filler_adds_none(
    case: Case, one_rank: Callable[[str], Reference], ranks: RankPool, folders: dict[str, Path]
) -> None:
    expected, (batch, *_) = one_rank(case.model)
    first, *others = ranks.run(count, case.world_size, folders[case.model], case, batch)
    assert all(other.sums == first.sums and other.metrics == first.metrics for other in others)
    for name in first.metrics.keys() - {"micro_batches"}:
        assert first.metrics[name] == pytest.approx(expected.metrics[0][name], rel=1e-5, abs=1e-6), name
    trained = float(batch.loss_mask.sum())
    assert first.sums["sequences"] == (len(LENGTHS), trained)
    assert first.sums["entropy"][1] == trained
    by_layer = [layer.flatten().bincount(minlength=8) for layer in first.chosen.unbind(1)]
    assert torch.equal(first.experts, torch.stack(by_layer))
    assert first.experts.sum(1).tolist() == [2 * batch.num_tokens] * 3
    for layer, counts in zip((1, 2, 3), by_layer, strict=True):
        assert first.sums[f"moe/layer_{layer}/idle_experts"][1] == 1
        violation = float(counts.max() / counts.double().mean() - 1)
        assert first.metrics[f"moe/layer_{layer}/max_violation"] == pytest.approx(violation)


# --- Experts without tokens, ranks without gradients


def send_all_to_two_experts(engine: archon.Engine) -> None:
    """By a bias that no score outweighs; every other expert, and the ranks that hold only such, get no token."""
    assert engine.routers is not None
    for block in engine.routers.blocks.values():
        assert block.gate.e_score_correction_bias is not None
        block.gate.e_score_correction_bias.copy_(torch.tensor([20.0, 10.0, 0, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize("layout", ["d2e2", "d4e4", "t2e2", "(attn:d2|ffn:t2)", "r2d2e2", "d2p2e2"])
def test_layout_parity_with_all_tokens_on_two_experts(layout: str, ranks: RankPool, folders: dict[str, Path]) -> None:
    case = Case(layout, "dense_first", BALANCED, lengths=LENGTHS)
    batches = [make_batch(seed, LENGTHS) for seed in range(STEPS + 1)]
    (expected,) = ranks.run(
        observe, 1, folders["dense_first"], case.on_one_rank, batches, change=send_all_to_two_experts
    )
    assert expected.metrics[0]["moe/layer_1/max_violation"] == 3.0 and expected.metrics[0]["grad_norm"] > 1.0
    assert not expected.gradients["model.layers.1.mlp.experts.down_proj"][2:].any()
    found = ranks.run(observe, case.world_size, folders["dense_first"], case, batches, change=send_all_to_two_experts)
    assert_same(merged(found), expected)


@pytest.mark.parametrize(
    "case",
    [Case("d4", "dense"), Case("d2e2", "moe"), Case("d2p2", "tied"), Case("c2", "moe")],
    ids=lambda case: case.id,
)
def test_layout_parity_where_only_one_sequence_is_trained(
    case: Case, one_rank: Callable[[str], Reference], ranks: RankPool, folders: dict[str, Path]
) -> None:
    case = replace(case, lengths=LENGTHS)
    batches = [only_trained(batch, sequence=3) for batch in one_rank(case.model)[1]]
    (expected,) = ranks.run(observe, 1, folders[case.model], case.on_one_rank, batches)
    assert_same(merged(ranks.run(observe, case.world_size, folders[case.model], case, batches)), expected)


def only_trained(batch: PackedBatch, sequence: int) -> PackedBatch:
    return batch.with_tokens(loss_mask=batch.loss_mask & (batch.sequence_ids == sequence))


# --- Updates that are skipped


class _NaNFromOneSequence(PolicyLoss):
    """Not finite where a token's advantage is above 100, which only one rank sees."""

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> Loss:
        result = super().__call__(outputs, batch)
        return Loss(result.sum * (torch.nan if (batch["advantages"] > 100).any() else 1.0), result.metrics)


@dataclass
class Skipped:
    """By kind of step: skipped updates, and whether the weights are still the same; and what was logged."""

    skips: dict[str, float]
    unchanged: dict[str, bool]
    log: list[str]


def skip(folder: Path, case: Case, batch: PackedBatch) -> Skipped:
    """Steps that must change nothing on any rank, and one afterwards that does."""
    engine = make_engine(folder, case)
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger("archon").addHandler(handler)
    last = batch.with_tokens(advantages=torch.where(batch.sequence_ids == 0, 1000.0, batch["advantages"]))
    train = engine.model.pipeline.train

    def train_and_spoil(*args: object) -> None:
        train(*args)
        if engine.ranks.rank == case.world_size - 1:
            local_shard(list(engine.model.all_parameters)[-1].grad).fill_(torch.inf)

    result = Skipped({}, {}, log)
    for kind, given in (
        ("masked", batch.with_tokens(loss_mask=torch.zeros_like(batch.loss_mask))),
        ("loss", last),
        ("gradient", batch),
        ("good", batch),
    ):
        before = engine.digest()
        engine.model.pipeline.train = train_and_spoil if kind == "gradient" else train
        metrics = engine.train_step(given, _NaNFromOneSequence())
        result.skips[kind] = metrics["skipped_updates"]
        result.unchanged[kind] = engine.digest() == before
    assert engine.version == 4
    return result


@pytest.mark.parametrize(
    "case",
    [
        Case("d2", "dense"),
        Case("d4e2", "moe", BALANCED),
        Case("t2", "tied"),
        Case("c2", "dense", {"context": "ring"}),
        Case("p2", "tied", ZBV),
        Case("d2p2", "moe", BALANCED),
    ],
    ids=lambda case: case.id,
)
def test_every_rank_skips_what_one_rank_cannot_use(case: Case, ranks: RankPool, folders: dict[str, Path]) -> None:
    results = ranks.run(skip, case.world_size, folders[case.model], case, make_batch(0, LENGTHS))
    for result in results:
        assert result.skips == {"masked": 1, "loss": 1, "gradient": 1, "good": 0}
        assert result.unchanged == {"masked": True, "loss": True, "gradient": True, "good": False}
        assert result.log[0] == "optimizer update skipped: no token to train on"
        assert all("not finite" in line for line in result.log[1:]) and len(result.log) == 3
    assert any("gradient of model." in result.log[1] or "gradient of lm_head" in result.log[1] for result in results)
    *others, spoiled = [result.log[2] for result in results]
    assert "gradient of another process" not in spoiled
    assert set(others) == {"optimizer update skipped: gradient of another process is not finite"}


# --- Ways to run

RUNS = [
    Case("t2", "moe", {"ac_mode": "full"}),
    Case("t2", "tied", {"ac_mode": "selective"}),
    Case("d2e2", "moe", {"ac_mode": "full"}),
    Case("d2e2", "moe", {"ac_mode": "selective"}),
    Case("c2", "moe", {"ac_mode": "full", "context": "ring"}),
    Case("c2", "tied", {"ac_mode": "selective"}),
    Case("p2", "moe", {"ac_mode": "full"}),
    Case("p2", "tied", {"ac_mode": "selective", "pp_schedule": "Interleaved1F1B"}),
    Case("d2t2", "moe", {"ac_mode": "selective", "selective_ac_option": 2}),
    Case("d2t2", "tied", {"ac_mode": "memory_budget"}),
    Case("d2e2", "moe", {"compile": "aot_eager"}),
    Case("d2t2e2", "moe", {"deterministic": True}),
]
COMPILED = [  # torch takes its time to trace, on every rank
    Case("t2", "tied", {"compile": "aot_eager"}),
    Case("c2", "tied", {"compile": "aot_eager"}),
    Case("p2", "moe", {"compile": "aot_eager"}),
    Case("d2t2", "moe", {"compile": "aot_eager", "ac_mode": "selective"}),
    Case("d2p2", "moe", {"compile": "aot_eager", "ac_mode": "full", **ZBV}),
]


@pytest.mark.parametrize(
    "case", [*RUNS, *(pytest.param(case, marks=pytest.mark.slow) for case in COMPILED)], ids=lambda case: case.id
)
def test_layout_parity_of_recompute_and_compile(
    case: Case, one_rank: Callable[[str], Reference], ranks: RankPool, folders: dict[str, Path]
) -> None:
    expected, batches = one_rank(case.model)
    found = ranks.run(
        observe, case.world_size, folders[case.model], replace(case, lengths=LENGTHS), batches, deadline=150
    )
    assert_same(merged(found), expected)


@pytest.mark.parametrize("layout", ["t2", "c2e2", "p2", pytest.param("d2t2", marks=pytest.mark.slow)])
def test_deterministic_runs_are_bit_equal(layout: str, ranks: RankPool, folders: dict[str, Path]) -> None:
    case = Case(layout, "moe", {"deterministic": True}, lengths=FEW)
    first, second = (merged(ranks.run(observe, case.world_size, folders["moe"], case)) for _ in range(2))
    assert first.metrics == second.metrics
    for ours, theirs in ((first.columns, second.columns), (first.weights, second.weights)):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_zero_bubble_refuses_to_recompute_by_operation(schedule: str, folders: dict[str, Path]) -> None:
    # torch runs the two halves of backward over one graph, and selective checkpoints allow a single backward.
    options = archon.Options(pp_schedule=schedule, ac_mode="selective")  # type: ignore[arg-type]
    config = ModelConfig.from_folder(folders["dense"])
    with pytest.raises(LayoutMisfit, match="ac_mode"):
        check_fit(archon.Layout.parse("p2"), config, options)
