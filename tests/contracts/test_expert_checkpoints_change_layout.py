"""Experts saved over e ranks load over any other number: those of every rank are there, each at its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_cases import PolicyLoss, make_batch, make_folder
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.tensor import DTensor

import archon
from archon.layout import Layout
from archon.training_state import training_state

POOL = RankPool(4)
LENGTHS = (37, 5, 20, 41)
SAVED_OVER = "d2e2"
LOADED_OVER = ["d1", "d4e4", "d4e2", "(attn:d2|ffn:d1t2)", "(attn:c2t2|ffn:d1t2e2)"]


def make_engine(folder: Path, layout: str) -> archon.Engine:
    optimizer = archon.OptimizerConfig(lr=1e-2)
    return archon.Engine.from_pretrained(folder, layout=layout, optimizer=optimizer, dtype="float32", device="cpu")


def expert_state(engine: archon.Engine) -> dict[str, Tensor]:
    """Parameters and moments of the experts, whole, by name in the checkpoint."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in training_state(engine.model.parts.values(), engine.optimizer).items()
        if ".experts." in name
    }


def saved(folder: Path, layout: str, path: Path) -> dict[str, Tensor]:
    engine = make_engine(folder, layout)
    engine.train_step(make_batch(0, LENGTHS), PolicyLoss())
    engine.save(path, "checkpoint")
    return expert_state(engine)


def loaded(folder: Path, layout: str, path: Path, export: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    engine = make_engine(folder, layout)
    engine.load(path)
    engine.save(export)
    return expert_state(engine), engine.forward(make_batch(1, LENGTHS)).logprobs


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A model's folder with a checkpoint in it, and what its writers held."""
    folder = make_folder("moe", tmp_path_factory.mktemp("moe"))
    mine, other = POOL.run(saved, 2, folder, SAVED_OVER, folder / "step")
    assert all(torch.equal(mine[name], tensor) for name, tensor in other.items())
    return folder, mine


def test_each_expert_has_values_of_its_own(written: tuple[Path, dict[str, Tensor]]) -> None:
    """So that no expert can stand for another unseen."""
    stacks = {name: state for name, state in written[1].items() if state.ndim > 2}
    assert len(stacks) == 4 * 2 * 3  # layers; gate and up, down; parameter and two moments
    for name, stack in stacks.items():
        assert len({float(expert.sum()) for expert in stack}) == len(stack) == 8, name


@pytest.mark.parametrize("layout", LOADED_OVER)
def test_layout_parity_of_experts_saved_over_two_ranks(
    layout: str, written: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder, expected = written
    by_rank = POOL.run(loaded, Layout.parse(layout).world_size, folder, layout, folder / "step", tmp_path / "export")
    for state, _ in by_rank:
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    batch, ours = make_batch(1, LENGTHS), by_rank[0][1]
    assert ours is not None
    for sequence in range(batch.num_sequences):
        index = batch.token_index([sequence])
        with torch.no_grad():
            logits = theirs(batch.input_ids[index][None]).logits[0] / batch["temperature"][sequence]
        logprobs = logits.log_softmax(-1)[:-1].gather(-1, batch.input_ids[index][1:, None])[:, 0]
        torch.testing.assert_close(ours[index][1:], logprobs * batch.loss_mask[index][1:], atol=1e-5, rtol=0)
