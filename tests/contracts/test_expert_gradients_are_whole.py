"""Routers and experts get the gradient of all tokens under tensor, expert and expert-tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_cases import STEPS, Case, assert_same, make_engine, make_folder, merged, observe, observe_clearly
from rank_pool import RankPool
from tiny_models import relative_error

import archon
from archon.batch import PackedBatch

POOL = RankPool()
LENGTHS = (37, 5, 20)
Reference = tuple[object, list[PackedBatch]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Reference:
    (reference,) = POOL.run(observe_clearly, 1, folder, Case("d1", "moe", lengths=LENGTHS).on_one_rank)
    return reference


@pytest.mark.parametrize("layout", ["t2", "t2e2", "(attn:t2|ffn:t2)"])
def test_layout_parity_of_router_weights_under_tensor_parallelism(
    layout: str, folder: Path, one_rank: Reference
) -> None:
    expected, batches = one_rank
    found = merged(POOL.run(observe, 2, folder, Case(layout, "moe", lengths=LENGTHS), batches))
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert relative_error(found.gradients[name], expected.gradients[name]) <= 1e-5
        assert relative_error(found.weights[name], expected.weights[name]) <= 1e-6


@pytest.mark.parametrize("layout", ["(attn:t2|ffn:t2)", "(attn:d2|ffn:t2)", "(attn:c2|ffn:t2)", "(attn:d2t2|ffn:d2t2)"])
def test_layout_parity_of_experts_split_by_tensor_ranks_alone(layout: str, folder: Path, one_rank: Reference) -> None:
    case = Case(layout, "moe", lengths=LENGTHS)
    assert archon.Layout.parse(layout).expert == 1
    expected, batches = one_rank
    assert_same(merged(POOL.run(observe, case.world_size, folder, case, batches)), expected)


def clip(folder: Path, case: Case, batches: list[PackedBatch]) -> tuple[int, object]:
    """Expert gradients that are not zero on this rank in a step whose tokens all go to experts 0 and 1, and the run."""
    engine = make_engine(folder, case)
    busy = 0
    train = engine.model.pipeline.train

    def train_and_look(*args: object) -> None:
        nonlocal busy
        train(*args)
        for name, parameter in engine.model.named_parameters():
            if "experts" in name and parameter.grad is not None:
                busy += int(parameter.grad.to_local().any())

    engine.model.pipeline.train = train_and_look
    engine.train_step(batches[0], archon.LossSpec("archon.losses.SupervisedLoss"))
    return busy, observe(folder, case, batches)


@pytest.mark.parametrize("layout", ["d4e4", "d2t2e4", "d2p2e2"])
def test_layout_parity_of_clipping_where_ranks_have_no_expert_gradient(
    layout: str, folder: Path, one_rank: Reference
) -> None:
    case = Case(layout, "moe", lengths=LENGTHS)
    two_experts = torch.tensor([0, 1]).expand(sum(LENGTHS), 4, 2)
    batches = [batch.with_tokens(routed_experts=two_experts) for batch in one_rank[1]]
    assert len(batches) == STEPS + 1
    (expected,) = POOL.run(observe, 1, folder, case.on_one_rank, batches)
    assert expected.metrics[0]["grad_norm"] > 1.0  # clipped
    busy, found = zip(*POOL.run(clip, case.world_size, folder, case, batches), strict=True)
    assert 0 in busy and any(busy)
    assert_same(merged(list(found)), expected)
