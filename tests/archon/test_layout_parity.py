"""Every layout computes what one process computes: metrics, columns, gradients, and weights after three steps."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from layout_cases import (
    CLEAR,
    MODELS,
    Case,
    Observed,
    assert_same,
    assert_same_in_bf16,
    choice_margins,
    make_engine,
    make_folder,
    merged,
    observe,
    observe_clearly,
)
from rank_pool import RankPool

from archon.batch import PackedBatch

Reference = tuple[Observed, list[PackedBatch]]

FEW = (37, 3, 20)  # fewer sequences than data ranks
STEEP = (200, 1, 1, 2, 1, 3, 150)  # one micro-batch of one sequence beside one of many
SHORT = (5, 7, 3, 9, 4, 8, 6, 2, 10, 1)  # many micro-batches
RING, ULYSSES = {"context": "ring"}, {"context": "ulysses"}
INTERLEAVED = {"pp_schedule": "Interleaved1F1B"}
ZERO_BUBBLE = {"pp_schedule": "InterleavedZeroBubble"}
ZBV = {"pp_schedule": "ZBVZeroBubble"}
ROUTER_LOSSES = {"moe_aux_loss_coeff": 0.02, "moe_z_loss_coeff": 0.01, "moe_router_bias_update_rate": 0.02}
OPTIONS = (RING, ULYSSES, INTERLEAVED, ZERO_BUBBLE, ZBV, ROUTER_LOSSES)

DATA = [
    Case("d2", "dense"),
    Case("d3", "normed"),  # nothing divides by 3
    Case("d8", "dense", budget=20),
    Case("d4", "normed", lengths=FEW),
    Case("d4", "tied", lengths=STEEP),
    Case("d2", "dense", budget=12, lengths=SHORT),
    Case("d4", "tied", is_critic=True),
    Case("d2", "dense", {"reshard_after_forward": "never"}),
    Case("r2", "tied"),
    Case("r2d2", "dense"),
    Case("r2d2t2", "normed"),
    Case("r2d2e2", "moe"),
    Case("r2d2e2", "dense_first", {"reshard_after_forward": "never"}, lengths=FEW),
    Case("r2p2", "dense"),
    Case("r2d2p2", "tied"),
]
TENSOR = [
    Case("t2", "dense"),
    Case("t4", "normed"),  # two ranks hold the same key-value head
    Case("t2", "tied", is_critic=True),
    Case("d2t2", "tied", budget=12, lengths=SHORT),
]
CONTEXT = [
    Case("c2", "dense", ULYSSES),
    Case("c2", "dense", RING),
    Case("c4", "tied", ULYSSES),
    Case("c4", "normed", RING, budget=20),
    Case("c8", "few_heads", ULYSSES),  # four heads: a ring of two around them
    Case("d2c2", "tied", RING, is_critic=True),
    Case("r2c2", "moe", RING),
]
PIPELINE = [
    Case("p2", "dense"),
    Case("p2", "tied", INTERLEAVED),
    Case("p2", "tied", ZERO_BUBBLE),
    Case("p2", "tied", ZBV),  # both copies of the embedding on rank 0
    Case("p4", "tied"),
    Case("p4", "deep_tied", INTERLEAVED),
    Case("p4", "dense_inside", ZERO_BUBBLE),
    Case("p4", "deep_tied", ZBV),
    Case("p2", "dense_inside", {**INTERLEAVED, "pp_layers_per_stage": 1}),
    Case("p2", "normed", {"pp_first_stage_less_layers": 0, "pp_last_stage_less_layers": 2}),
    Case("p2", "normed", is_critic=True, budget=12, lengths=SHORT),
    Case("p2", "tied", is_critic=True),  # the embedding is no head here
    Case("p2", "tied", ZBV, is_critic=True),
    Case("d2p2", "moe", ZBV, lengths=FEW),
    Case("p2t2", "tied", ZERO_BUBBLE),
    Case("p2c2", "dense", RING),
    Case("d2p2t2", "dense_first", INTERLEAVED),
    Case("p2t2c2", "dense", {**ULYSSES, **ZBV}, is_critic=True),
]
EXPERT = [
    Case("t2", "moe"),
    Case("c2", "dense_first", ULYSSES),
    Case("d2e2", "dense_first"),
    Case("d4e4", "moe", budget=20),
    Case("d8e8", "moe", lengths=FEW),
    Case("t2e2", "moe"),
    Case("c4e4", "moe", RING),
    Case("d2t2e4", "dense_first"),
    Case("d2t2c2e8", "moe", ROUTER_LOSSES),
    Case("(attn:t2|ffn:t2)", "moe"),
    Case("(attn:d2|ffn:t2)", "moe", lengths=STEEP),
    Case("(attn:d4|ffn:t2e2)", "dense_first", budget=20),  # experts split over data ranks
    Case("(attn:d2t2|ffn:t4)", "moe", lengths=FEW),
    Case("(attn:t4|ffn:t1e2)", "dense_first"),
    Case("(attn:c2t2|ffn:t2e2)", "moe", ULYSSES),
    Case("d2p2c2e4", "dense_inside", {**RING, **INTERLEAVED}),
    Case("d2p2e2", "moe", ROUTER_LOSSES, is_critic=True),
]
BF16 = [
    Case("d2", "dense", dtype="bfloat16"),
    Case("t2", "normed", dtype="bfloat16"),
    Case("c2", "tied", RING, dtype="bfloat16"),
    Case("p2", "tied", ZBV, dtype="bfloat16"),
    Case("d2t2e4", "moe", dtype="bfloat16", replay=True),
]
LARGE = [  # dimensions that smaller layouts combine too
    Case("d8", "moe", lengths=FEW),
    Case("t8", "dense"),
    Case("d2t4", "normed", lengths=STEEP),
    Case("c8", "normed", ULYSSES),
    Case("c8", "dense", RING, lengths=FEW),
    Case("t2c4", "few_heads", ULYSSES),  # two heads on a tensor rank
    Case("t4c2", "dense", ULYSSES),
    Case("d2t2c2", "dense", ULYSSES, lengths=STEEP),
    Case("r2c2t2", "moe", RING),
    Case("p2c4", "normed", {**ULYSSES, **ZBV}),
    Case("d2p2t2", "tied", lengths=STEEP),
    Case("t4e2", "dense_first"),
    Case("(attn:d2p2t2|ffn:p2t2e2)", "dense_first", {**ZBV, **ROUTER_LOSSES}),
]
QUICK = [*DATA, *TENSOR, *CONTEXT, *PIPELINE, *EXPERT, *BF16]
CASES = [*QUICK, *LARGE]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """The model folder of a case, made once."""
    parent, made = tmp_path_factory.mktemp("models"), {}

    def folder(case: Case) -> Path:
        key = (case.model, case.is_critic)
        if key not in made:
            made[key] = make_folder(case.model, parent, case.is_critic)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def reference(ranks: RankPool, folders: Callable[[Case], Path]) -> Callable[[Case], Reference]:
    """What one process observes of a case and on which batches, computed once."""
    known: list[tuple[Case, Reference]] = []

    def one_rank(case: Case) -> Reference:
        wanted = case.on_one_rank
        for other, observed in known:
            if other == wanted:
                return observed
        (observed,) = ranks.run(observe_clearly, 1, folders(case), wanted)
        known.append((wanted, observed))
        return observed

    return one_rank


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in LARGE)], ids=lambda case: case.id
)
def test_layout_parity(
    case: Case, ranks: RankPool, folders: Callable[[Case], Path], reference: Callable[[Case], Reference]
) -> None:
    expected, batches = reference(case)
    found = merged(ranks.run(observe, case.world_size, folders(case), case, batches, deadline=120))
    if case.dtype == "bfloat16":
        assert_same_in_bf16(found, expected)
    else:
        assert_same(found, expected)


def test_layout_parity_covers_what_it_should() -> None:
    for cases, fewest in ((QUICK, 48), (CASES, 60)):
        assert len({(case.layout, case.model, str(case.options)) for case in cases}) >= fewest
    assert len({case.layout for case in QUICK}) >= 40
    assert {case.model for case in QUICK} == set(MODELS)
    assert pairs_of(QUICK) == pairs_of(CASES)
    assert all(any(option.items() <= case.options.items() for case in QUICK) for option in OPTIONS)
    assert len({case.id for case in CASES}) == len(CASES)
    assert all(case.world_size <= 8 for case in CASES)


def pairs_of(cases: list[Case]) -> set[tuple[str, str]]:
    """Dimensions, and pairs of them, by which some layout splits."""
    splits = [{letter for letter, size in re.findall(r"([drptce])(\d+)", case.layout) if size != "1"} for case in cases]
    return {pair for letters in splits for pair in itertools.combinations_with_replacement(sorted(letters), 2)}


@pytest.mark.parametrize("model", MODELS)
def test_no_gradient_is_zero_and_no_expert_choice_is_close(
    model: str, reference: Callable[[Case], Reference], folders: Callable[[Case], Path]
) -> None:
    case = Case("d1", model)
    observed, batches = reference(case)
    largest = max(gradient.abs().max() for gradient in observed.gradients.values())
    for name, gradient in observed.gradients.items():
        assert gradient.norm() >= 1e-4 * largest, f"{name}: a ratio to this gradient would say nothing"
    engine = make_engine(folders(case), case.on_one_rank, optimizer=None)
    assert choice_margins(engine, batches[0]).min() >= CLEAR > 1e-4
    assert torch.isfinite(choice_margins(engine, batches[0])).any() == (engine.routers is not None)
