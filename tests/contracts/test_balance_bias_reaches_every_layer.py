"""The update of the balance bias does not stop at a layer without balancing: every layer with experts is balanced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_cases import Case, PolicyLoss, make_batch, make_engine, make_folder
from rank_pool import RankPool
from torch import Tensor

POOL = RankPool(2)


def biases(folder: Path, case: Case) -> dict[str, Tensor]:
    engine = make_engine(folder, case)
    engine.train_step(make_batch(0, (37, 5, 64)), PolicyLoss())
    return {name: tensor.clone() for name, tensor in engine.weights() if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("layout", ["d1", "d2", "p2"])
def test_layers_behind_a_dense_one_are_balanced(layout: str, tmp_path: Path) -> None:
    folder = make_folder("dense_inside", tmp_path)  # layer 2 of 6 is dense
    case = Case(layout, "dense_inside", {"moe_router_bias_update_rate": 0.01})
    for found in POOL.run(biases, case.world_size, folder, case):
        assert sorted(found) == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 1, 3, 4, 5)]
        for name, bias in found.items():
            moved = bias[bias != 0].abs()
            assert moved.numel() >= 2 and torch.allclose(moved, torch.tensor(0.01)), name
