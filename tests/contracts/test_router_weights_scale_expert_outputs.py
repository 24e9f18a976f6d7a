"""Gate weights multiply what experts return, not what they read, and are renormalised only where the config says so."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build, ours_from

from archon.models.moe import MoE


@pytest.mark.parametrize("renormalize", [False, True])
def test_moe_equals_transformers_block(renormalize: bool) -> None:
    theirs = build("qwen3_moe", norm_topk_prob=renormalize)
    ours = ours_from(theirs)
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(3))
    for ours_layer, their_layer in zip(ours.model.layers.values(), theirs.model.layers, strict=True):
        torch.testing.assert_close(ours_layer.mlp(x), their_layer.mlp(x[None])[0], atol=1e-5, rtol=1e-5)


def test_outputs_are_what_the_formula_says() -> None:
    theirs = build("qwen3_moe", norm_topk_prob=False)
    ours = ours_from(theirs)
    block = ours.model.layers["0"].mlp
    assert isinstance(block, MoE)
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(4))
    probs = (x @ block.gate.weight.T).softmax(-1)
    expected = torch.zeros_like(x)
    for token in range(20):
        for expert in probs[token].topk(2).indices.tolist():
            gate, up = (block.experts.gate_up_proj[expert] @ x[token]).chunk(2)
            expected[token] += probs[token, expert] * (
                block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            )
    torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=1e-5)
