"""The Triton kernels of routing in Triton's interpreter against float64; tolerances as in test_routing."""

from __future__ import annotations

import pytest
import torch
from routing_cases import GATES, assert_equals_truth, options, random_choices, spaced_logits

from archon_kernels.routing import count_experts, topk_gate

pytestmark = pytest.mark.slow  # the interpreter takes milliseconds per program

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "triton")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "dtype"),
    [
        (0, 8, 2, torch.float32),
        (1, 1, 1, torch.bfloat16),
        (7, 8, 8, torch.float32),
        (129, 8, 2, torch.bfloat16),
        (7, 128, 1, torch.float64),
        (129, 128, 8, torch.float32),
        (7, 160, 6, torch.float32),  # groups of 20
    ],
    ids=str,
)
def test_gate_equals_float64(gate: str, tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    assert_equals_truth(spaced_logits(tokens, experts).to(dtype), top_k, options(gate, experts, top_k))


@pytest.mark.parametrize("gate", GATES)
def test_recorded_choices_are_weighed_by_the_current_logits(gate: str) -> None:
    recorded = random_choices(21, 16, 4)
    recorded[3] = recorded[3, 0]
    recorded[6:11] = -1
    recorded[12:15, 2] = -1
    assert_equals_truth(spaced_logits(21, 16), 4, {**options(gate, 16, 4), "indices_TK": recorded})


@pytest.mark.parametrize("gate", ["qwen3", "deepseek_v2", "sigmoid"])
def test_of_equal_scores_the_first_experts_and_groups_win(gate: str) -> None:
    indices = topk_gate(torch.zeros(3, 64), 4, **options(gate, 64, 4))[1]
    assert indices.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.filterwarnings("ignore:invalid value")
def test_tokens_whose_logits_are_not_numbers_get_different_experts() -> None:
    _, indices = topk_gate(torch.full((2, 4), torch.nan), 3, renormalize=True)
    assert indices.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 8, 2), (1, 1, 1), (129, 8, 2), (300, 128, 8)])
def test_counts(tokens: int, experts: int, top_k: int) -> None:
    """The last of these needs several programs."""
    indices = random_choices(tokens, experts, top_k, seed=tokens)
    assert torch.equal(count_experts(indices, experts), torch.bincount(indices.flatten(), minlength=experts))
    mask = torch.rand(tokens) < 0.5
    counted = count_experts(indices, experts, mask)
    assert torch.equal(counted, torch.bincount(indices[mask].flatten(), minlength=experts))
    assert torch.equal(count_experts(torch.zeros_like(indices), experts)[:1], torch.tensor([tokens * top_k]))
