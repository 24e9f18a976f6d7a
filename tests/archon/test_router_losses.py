"""Balance loss, z-loss and balance bias of the routers against the papers' formulas, in any layout and any cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_cases import (
    Case,
    PolicyLoss,
    flattened,
    gathered_moments,
    make_clear_batch,
    make_engine,
    make_folder,
)
from rank_pool import RankPool
from tiny_models import relative_error
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import archon
from archon.batch import PackedBatch, mini_batches
from archon.losses import Loss, TokenOutputs

LENGTHS = (1, 2, 37, 5, 64, 13)
EXPERTS, TOP_K = 8, 2
SPARSE = (0, 1, 3, 4, 5)  # of dense_inside: layer 2 is dense
BALANCE, Z, RATE = 0.02, 0.01, 0.03
LOSSES = {"moe_aux_loss_coeff": BALANCE, "moe_z_loss_coeff": Z}
BIAS = {"moe_router_bias_update_rate": RATE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("dense_inside", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def batch(ranks: RankPool, folder: Path) -> PackedBatch:
    (batch,) = ranks.run(clear_batch, 1, folder)
    return batch


def clear_batch(folder: Path) -> PackedBatch:
    return make_clear_batch(make_engine(folder, Case("d1", "", budget=sum(LENGTHS))), seed=0, lengths=LENGTHS)


# --- Losses


class _RouterLossesOnly(PolicyLoss):
    """Nothing to learn but what the routers pay."""

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> Loss:
        return Loss(super().__call__(outputs, batch).sum * 0.0)


@pytest.fixture(scope="module")
def formula(folder: Path, batch: PackedBatch) -> tuple[float, float, dict[str, Tensor]]:
    """Balance loss, z-loss and their gradient by transformers in fp64, one sequence at a time.

    DeepSeek-V3 report (arXiv 2412.19437), eq. 17-20, for a sequence of T tokens and experts i: f_i counts the tokens
    that chose i, times E / (K T); P_i is the mean probability of i; the loss is the sum of f_i P_i. ST-MoE
    (arXiv 2202.08906), eq. 5: the z-loss is the mean over tokens of the squared log-sum-exp of the logits.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    logits: list[Tensor] = []
    for layer in SPARSE:
        gate = model.model.layers[layer].mlp.gate
        gate.register_forward_pre_hook(lambda gate, args: logits.append(F.linear(args[0].flatten(0, -2), gate.weight)))
    balance, z = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for ids in batch.input_ids.split(batch.lengths.tolist()):
        logits.clear()
        model(ids[None])
        assert len(logits) == len(SPARSE)
        for logits_TE in logits:
            probs_TE = logits_TE.softmax(-1)
            chosen = F.one_hot(probs_TE.topk(TOP_K).indices, EXPERTS).sum((0, 1))
            frequency_E = chosen * EXPERTS / (TOP_K * len(ids))
            balance = balance + (frequency_E * probs_TE.mean(0)).sum() / batch.num_sequences
            z = z + logits_TE.logsumexp(-1).square().sum() / batch.num_tokens
    balance, z = BALANCE * balance, Z * z
    (balance + z).backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return balance.item(), z.item(), gradients


def step(folder: Path, case: Case, batch: PackedBatch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of a step with nothing but router losses, and the gradients of it that this rank has, not clipped."""
    no_clip = archon.OptimizerConfig(lr=1e-4, gradient_clipping=0.0)
    engine = make_engine(folder, case, optimizer=no_clip)
    metrics = engine.train_step(batch, _RouterLossesOnly())
    return metrics, {name: moment / 0.1 for name, moment in gathered_moments(engine).items()}


CASES = [
    Case("d1", "dense_inside", LOSSES, budget=1000),
    Case("d1", "dense_inside", LOSSES, budget=64),
    Case("t2", "dense_inside", LOSSES),
    Case("c2", "dense_inside", LOSSES),
    Case("c4", "dense_inside", {**LOSSES, "context": "ring"}),  # sequences straddle ranks
    Case("d4e4", "dense_inside", LOSSES),
    Case("d2p2", "dense_inside", {**LOSSES, "pp_schedule": "ZBVZeroBubble"}),
    Case("(attn:d2t2|ffn:t2e2)", "dense_inside", {**LOSSES, "ac_mode": "full"}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layout_parity_of_router_losses_with_the_formulas(
    case: Case, ranks: RankPool, folder: Path, batch: PackedBatch, formula: tuple[float, float, dict[str, Tensor]]
) -> None:
    balance, z, expected = formula
    found: dict[str, Tensor] = {}
    for metrics, gradients in ranks.run(step, case.world_size, folder, case, batch):
        assert metrics["moe/balance_loss"] == pytest.approx(balance, rel=1e-5)
        assert metrics["moe/z_loss"] == pytest.approx(z, rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(flattened(expected).double().norm()), rel=1e-5)
        found |= gradients
    for name, gradient in found.items():
        if name in expected and expected[name].any():
            assert relative_error(gradient.view_as(expected[name]), expected[name]) <= 1e-5, name
        else:  # what lies behind the last router
            assert not gradient.any(), name
    assert expected.keys() <= found.keys()


# --- Balance bias

Biases = dict[str, Tensor]


def move(folder: Path, case: Case, batch: PackedBatch) -> dict[str, tuple[Biases, list[Tensor]]]:
    """Biases after one update, after two of a step, and after two steps; and choices [T, L, K] before each update."""
    found = {}
    shares = mini_batches(batch, 2)
    for name, steps, count in (
        ("one update", [batch], 1),
        ("two updates", [batch], 2),
        ("two steps", [batch.select(share) for share in shares], 1),
    ):
        engine = make_engine(folder, case, optimizer=archon.OptimizerConfig(type="sgd", lr=0.0))
        choices = []
        for given in steps:
            choices.append(engine.forward(given, ("routed_experts",)).routed_experts)
            engine.train_step(given, PolicyLoss(), n_minibatches=count)
        biases = {name: tensor.clone() for name, tensor in engine.weights() if name.endswith("correction_bias")}
        found[name] = biases, choices
    return found


BALANCED = [
    Case("d1", "dense_inside", BIAS, budget=1000),
    Case("d1", "dense_inside", BIAS, budget=64),
    Case("d2e2", "dense_inside", BIAS),
    Case("t2", "dense_inside", BIAS),
    Case("c2", "dense_inside", BIAS),
    Case("p2", "dense_inside", BIAS),
    Case("r2d2", "dense_inside", BIAS, budget=64),
]


@pytest.mark.parametrize("case", BALANCED, ids=lambda case: case.id)
def test_layout_moves_the_bias_once_per_update_by_the_counts_of_all(
    case: Case, ranks: RankPool, folder: Path, batch: PackedBatch
) -> None:
    for found in ranks.run(move, case.world_size, folder, case, batch):
        biases, (choices,) = found["one update"]
        assert_moved_once(biases, choices)
        twice, again = found["two updates"][0], found["two steps"][0]
        assert twice.keys() == again.keys() == biases.keys()
        assert all(torch.equal(twice[name], again[name]) for name in twice)
        assert any(not torch.equal(twice[name], biases[name]) for name in twice)


def assert_moved_once(biases: Biases, choices_TLK: Tensor) -> None:
    """By the rate, up where an expert had fewer tokens than the mean, down where more, in every layer with experts."""
    assert sorted(biases) == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in SPARSE]
    for place, name in enumerate(sorted(biases)):
        counts = choices_TLK[:, place].flatten().bincount(minlength=EXPERTS).double()
        expected = RATE * (counts.mean() - counts).sign()
        assert torch.allclose(biases[name].double(), expected), name
