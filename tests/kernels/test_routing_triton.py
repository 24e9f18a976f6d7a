"""The Triton kernels of routing in Triton's interpreter against float64; tolerances as in test_routing."""

from __future__ import annotations

import pytest
import torch
from cases import noted, pairwise
from moe_cases import CHOICES, EXPERTS, choices, random_choices
from routing_cases import GATES, assert_equals_truth, options, spaced_logits

from archon_kernels.routing import count_experts, topk_gate

pytestmark = pytest.mark.slow  # the interpreter takes milliseconds per program

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "triton")


TOKENS = (0, 1, 7, 129)
GATED = pairwise(
    lambda experts, top_k, **_: top_k <= experts,
    gate=tuple(GATES),
    tokens=TOKENS,
    experts=EXPERTS,
    top_k=CHOICES,
    dtype=(torch.float32, torch.bfloat16),
)


@pytest.mark.parametrize(("gate", "tokens", "experts", "top_k", "dtype"), [case.values() for case in GATED])
def test_gate_equals_float64(gate: str, tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    assert_equals_truth(spaced_logits(tokens, experts).to(dtype), top_k, options(gate, experts, top_k))


@pytest.mark.parametrize("gate", GATES)
def test_gate_of_groups_that_fill_no_block_and_gate_in_fp64(gate: str) -> None:
    assert_equals_truth(spaced_logits(7, 160), 6, options(gate, 160, 6))  # groups of 20
    assert_equals_truth(spaced_logits(7, 128).double(), 1, options(gate, 128, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (7, 8, 8), (129, 128, 2)])
def test_all_tokens_to_one_expert(tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    arguments = {"renormalize": True, "indices_TK": choices(tokens, experts, top_k, skewed=True)}
    assert_equals_truth(spaced_logits(tokens, experts).to(dtype), top_k, arguments)


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


def test_counts() -> None:
    shapes = pairwise(
        lambda experts, top_k, **_: top_k <= experts,
        tokens=(*TOKENS, 300),  # of which the last may need several programs
        experts=EXPERTS,
        top_k=CHOICES,
        skewed=(False, True),
        mask=(None, "zeros", "ones", "random"),
    )
    for case in shapes:
        kind, experts = case.pop("mask"), case["experts"]
        indices = choices(**case)
        part = {"zeros": 0.0, "ones": 1.0, "random": 0.5}.get(kind)
        mask = None if part is None else torch.rand(indices.shape[0]) < part
        with noted(**case, mask=mask):
            kept = indices if mask is None else indices[mask]
            counted = count_experts(indices, experts, mask)
            assert torch.equal(counted, torch.bincount(kept.flatten(), minlength=experts))
