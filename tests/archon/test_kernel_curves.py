"""The kernels that run by default train along the same curve as the references in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from layout_cases import Case, PolicyLoss, make_batch, make_engine, make_folder
from torch.profiler import ProfilerActivity, profile

import archon
from archon.batch import PackedBatch
from archon_kernels import extension

STEPS = 20
LENGTHS = (1, 37, 5, 64, 20)
EVERYWHERE = {"rms_norm", "rms_norm_backward", "rotate", "packed_attention", "logprob_statistics", "logprob_gradient"}
EXPERTS = {"topk_gate", "count_experts", "permute", "combine", "grouped_swiglu", "grouped_linear", "swiglu_backward"}
MODELS = {
    "dense": (Case("d1", "dense", budget=sum(LENGTHS)), EVERYWHERE),
    "moe": (
        Case("d1", "moe", {"moe_aux_loss_coeff": 0.02, "moe_z_loss_coeff": 0.01}, sum(LENGTHS)),
        EVERYWHERE | EXPERTS,
    ),
}
# Of loss and entropy, and of the gradient norm, relative. In bf16 each step rounds anew.
TOLERANCES: dict[Literal["float32", "bfloat16"], tuple[float, float]] = {
    "float32": (1e-5, 1e-5),
    "bfloat16": (5e-3, 5e-2),
}


def train(folder: Path, case: Case, batch: PackedBatch) -> tuple[list[dict[str, Any]], set[str]]:
    """The metrics of every step, and the C++ ops that the first one ran."""
    engine = make_engine(folder, case, optimizer=archon.OptimizerConfig(lr=3e-4, eps=1e-6, weight_decay=0.01))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        metrics = [engine.train_step(batch, PolicyLoss())]
    metrics += [engine.train_step(batch, PolicyLoss()) for _ in range(STEPS - 1)]
    ops = {event.key.removeprefix("archon_cpp::") for event in seen.key_averages() if "archon_cpp::" in event.key}
    return metrics, ops


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("model", MODELS)
def test_default_kernels_and_references_train_along_one_curve(
    model: str, dtype: Literal["float32", "bfloat16"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extension.load(), extension.problem()
    case, expected_ops = MODELS[model]
    # The rounding of bf16 makes routers choose otherwise now and then: there they take choices made once, in fp32.
    case = replace(case, dtype=dtype, replay=model == "moe" and dtype == "bfloat16")
    folder = make_folder(model, tmp_path)
    batch = make_batch(lengths=LENGTHS)
    batch = batch.with_tokens(advantages=torch.ones(batch.num_tokens))  # a loss that has a minimum
    monkeypatch.delenv("ARCHON_KERNELS", raising=False)
    if case.replay:
        scorer = make_engine(folder, replace(case, dtype="float32"), optimizer=None)
        batch = batch.with_tokens(routed_experts=scorer.forward(batch, ("routed_experts",)).routed_experts)
    found, ops = train(folder, case, batch)
    monkeypatch.setenv("ARCHON_KERNELS", "reference")
    expected, no_ops = train(folder, case, batch)
    assert ops >= expected_ops and not no_ops
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.5  # it learns
    of_loss, of_norm = TOLERANCES[dtype]
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name, tolerance in (("loss", of_loss), ("entropy", of_loss), ("grad_norm", of_norm)):
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance), (step, name)
