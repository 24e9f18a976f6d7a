"""Every data rank runs as many micro-batches, of sizes that fit together, and one without gradients joins the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import Case, assert_same, make_folder, merged, observe, observe_clearly
from rank_pool import RankPool

from archon.batch import PackedBatch
from archon.layout import Layout
from archon.mesh import Ranks
from archon.micro_batch import plan_slots
from archon.models.config import ModelConfig
from archon.options import Options

POOL = RankPool()
LAYOUTS = ("d1", "d3", "d8", "r2d2", "d4t2", "d2p2", "d3p4", "(attn:d4|ffn:t2e2)")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig.from_folder(make_folder("moe", tmp_path_factory.mktemp("models")))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    units=st.lists(st.integers(0, 5), min_size=20, max_size=20),
    budget=st.integers(1, 120),
    text=st.sampled_from(LAYOUTS),
    schedule=st.sampled_from(["1F1B", "ZBVZeroBubble", "InterleavedZeroBubble"]),
)
def test_layout_ranks_plan_equal_counts_that_cover_every_sequence_once(
    config: ModelConfig, lengths: list[int], units: list[int], budget: int, text: str, schedule: str
) -> None:
    layout, options = Layout.parse(text), Options(pp_schedule=schedule)  # type: ignore[arg-type]
    batch = PackedBatch.from_sequences([{"input_ids": torch.zeros(length)} for length in lengths])
    batch = batch.with_sequences(unit=torch.tensor(units[: len(lengths)]))
    plans = [plan_slots(batch, budget, Ranks(layout, rank), config, options) for rank in range(layout.world_size)]
    assert len({len(plan) for plan in plans}) == 1
    trained = []
    for rank, plan in enumerate(plans):
        place = layout.coordinates(rank)
        if place.pipeline == place.context == place.tensor == 0:
            trained += [index for slot in plan for index in slot.sequences]
        for slot in plan:
            assert sum(lengths[index] for index in slot.sequences) <= slot.tokens
            assert slot.tokens % layout.tensor == 0
    assert sorted(trained) == list(range(len(lengths)))
    for slots in zip(*plans, strict=True):
        for unit in batch.units():
            assert all(set(unit) <= set(slot.sequences) or not set(unit) & set(slot.sequences) for slot in slots)
        if layout.pipeline > 1:
            assert len({slot.tokens for slot in slots}) == 1
    if layout.pipeline > 1:
        assert len(plans[0]) >= layout.pipeline


@pytest.mark.parametrize("layout", ["d4", "r2d2", "d4e4", "d2p2"])
def test_layout_parity_of_ranks_without_a_sequence(layout: str, tmp_path: Path) -> None:
    case = Case(layout, "moe" if "e" in layout else "dense", lengths=(37,))
    folder = make_folder(case.model, tmp_path)
    ((expected, batches),) = POOL.run(observe_clearly, 1, folder, case.on_one_rank)
    assert_same(merged(POOL.run(observe, case.world_size, folder, case, batches)), expected)
