"""Gradients and metrics are those of one mean over all tokens, however ranks and micro-batches share them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_cases import Case, Observed, assert_same, make_folder, merged, observe
from rank_pool import RankPool

POOL = RankPool()
UNEVEN = (4, 98)  # 3 and 97 tokens to predict
SPLIT = (7, 60, 3, 25, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("dense", tmp_path_factory.mktemp("models"))


def observed(folder: Path, case: Case) -> Observed:
    return merged(POOL.run(observe, case.world_size, folder, case))


def test_layout_parity_of_data_ranks_with_3_and_97_tokens(folder: Path) -> None:
    case = Case("d2", "dense", lengths=UNEVEN)
    assert_same(observed(folder, case), observed(folder, case.on_one_rank))


@pytest.mark.parametrize(("layout", "budget"), [("d1", 100), ("d1", 60), ("d1", 30), ("d2", 60), ("p2", 60)])
def test_layout_parity_of_uneven_cuts_in_gradient_and_norm(layout: str, budget: int, folder: Path) -> None:
    case = Case(layout, "dense", budget=budget, lengths=SPLIT)
    found, expected = observed(folder, case), observed(folder, case.on_one_rank)
    assert found.metrics[0]["micro_batches"] >= (2 if layout != "d2" and budget < 100 else 1)
    assert found.metrics[0]["grad_norm"] == pytest.approx(expected.metrics[0]["grad_norm"], rel=1e-5)
    assert_same(found, expected)


@pytest.mark.parametrize("context", ["ulysses", "ring"])
@pytest.mark.parametrize("layout", ["c2", "d2c2"])
def test_layout_parity_of_context_ranks_in_gradient_and_metrics(layout: str, context: str, folder: Path) -> None:
    case = Case(layout, "dense", {"context": context}, budget=60, lengths=SPLIT)
    found, expected = observed(folder, case), observed(folder, case.on_one_rank)
    assert found.metrics[0]["sequences"] == expected.metrics[0]["sequences"]  # a count over a count: nothing twice
    assert_same(found, expected)
    assert torch.isfinite(found.columns["logprobs"]).all()
