"""The top-k gate and its counts, reference and C++, against float64, transformers and closed cases.

Tolerances: choices equal; weights and gradients 1e-6 relative and absolute for fp32 logits, 8e-3 relative for the
gradient of bf16 logits, which is rounded to bf16; 1e-12 for fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from routing_cases import GATES, assert_equals_truth, options, random_choices, spaced_logits, true_gate
from torch import Tensor

from archon_kernels import extension
from archon_kernels.routing import _count, _gate, _gate_backward, count_experts, topk_gate

SIZES = [(1, 1), (8, 1), (8, 2), (8, 8), (128, 1), (128, 8)]  # experts, choices


@pytest.fixture(params=["reference", "cpp"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpp" and extension.problem() is not None:
        pytest.skip(f"no C++ ops: {extension.problem()}")
    monkeypatch.setenv("ARCHON_KERNELS", request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
@pytest.mark.parametrize("gate", GATES)
def test_gate_equals_float64(gate: str, experts: int, top_k: int, dtype: torch.dtype) -> None:
    arguments = options(gate, experts, top_k)
    for tokens in (0, 1, 7, 129):
        assert_equals_truth(spaced_logits(tokens, experts, seed=tokens).to(dtype), top_k, arguments)


@pytest.mark.parametrize("gate", ["qwen3", "deepseek_v3"])
def test_gate_of_many_tokens_equals_float64(gate: str) -> None:
    assert_equals_truth(spaced_logits(1000, 128), 8, options(gate, 128, 8))


@pytest.mark.parametrize("gate", GATES)
def test_recorded_choices_are_weighed_by_the_current_logits(gate: str) -> None:
    """Also those that name an expert twice, and those of -1, for which the gate puts its own in their place."""
    recorded = random_choices(21, 16, 4)
    recorded[3] = recorded[3, 0]
    recorded[6:11] = -1
    recorded[12:15, 2] = -1
    assert_equals_truth(spaced_logits(21, 16), 4, {**options(gate, 16, 4), "indices_TK": recorded})


@pytest.mark.parametrize("gate", GATES)
def test_gradient_equals_finite_differences(gate: str) -> None:
    arguments = {**options(gate, 16, 4), "indices_TK": random_choices(5, 16, 4)}
    logits = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: topk_gate(x, 4, **arguments)[0], logits)


@pytest.mark.parametrize("gate", ["softmax", "qwen3", "deepseek_v2", "sigmoid"])
def test_of_equal_scores_the_first_experts_and_groups_win(gate: str) -> None:
    arguments = options(gate, 64, 4)
    for values in (torch.zeros(3, 64), torch.arange(64).flip(0).expand(3, 64) // 9 / 4):
        for dtype in (torch.float32, torch.bfloat16):
            _, indices = topk_gate(values.to(dtype), 4, **arguments)
            _, expected = true_gate(values, 4, **arguments)
            assert torch.equal(indices, expected)
    assert topk_gate(torch.zeros(1, 64), 4, **arguments)[1].tolist() == [[0, 1, 2, 3]]


def test_all_tokens_to_one_expert() -> None:
    logits = torch.zeros(129, 8)
    logits[:, 5] = 30.0
    weights, indices = topk_gate(logits, 1, renormalize=False)
    assert (indices == 5).all() and (weights - 1).abs().max() < 1e-6
    assert count_experts(indices, 8).tolist() == [0, 0, 0, 0, 0, 129, 0, 0]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_extreme_logits(scores: Any) -> None:
    """No overflow on the way, and tokens whose logits are not numbers still get K different experts."""
    logits = torch.tensor([[300.0, -300.0, 0.0, 299.0], [-300.0, -301.0, -300.5, -90.0], [-torch.inf, 1.0, 0.5, 0.0]])
    weights, indices = topk_gate(logits, 2, renormalize=False, scores=scores)
    expected, _ = true_gate(logits, 2, renormalize=False, scores=scores, indices_TK=indices)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-37)
    _, indices = topk_gate(torch.full((2, 4), torch.nan), 3, renormalize=True, scores=scores)
    assert indices.tolist() == [[0, 1, 2]] * 2


def test_a_selection_bias_moves_the_choice_and_not_the_weights() -> None:
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor([0.0, 2.0, 0.0, -2.0, 0.0, 1.5])
    weights, indices = topk_gate(logits, 2, renormalize=True, selection_bias_E=bias)
    assert torch.equal(indices, torch.tensor([[1, 5]]).expand(9, 2))  # a probability is at most 1
    assert torch.equal(weights, topk_gate(logits, 2, renormalize=True, indices_TK=indices)[0])


def test_recorded_choices_win_over_a_selection_bias() -> None:
    logits, recorded, bias = torch.randn(9, 6), random_choices(9, 6, 2), torch.tensor([5.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    recorded[4:] = -1
    _, indices = topk_gate(logits, 2, renormalize=True, selection_bias_E=bias, indices_TK=recorded)
    assert torch.equal(indices[:4], recorded[:4]) and torch.equal(indices[4:], torch.tensor([[0, 1]]).expand(5, 2))


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_gate_hf_parity_qwen3(norm_topk_prob: bool) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(
        hidden_size=32, num_experts=32, num_experts_per_tok=4, norm_topk_prob=norm_topk_prob
    )
    router = modeling.Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    logits, expected, choices = router(torch.randn(50, 32, generator=torch.Generator().manual_seed(1)))
    weights, indices = topk_gate(logits, 4, renormalize=norm_topk_prob)
    assert torch.equal(indices, choices)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


def test_gate_hf_parity_deepseek_v3() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=32,
        num_local_experts=32,
        num_experts_per_tok=4,
        n_group=8,
        topk_group=3,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    router = modeling.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    router.e_score_correction_bias.copy_(0.1 * torch.randn(32, generator=torch.Generator().manual_seed(2)))
    logits, expected, choices = router(0.2 * torch.randn(50, 32, generator=torch.Generator().manual_seed(1)))
    assert logits.shape == (50, 32)
    weights, indices = topk_gate(
        logits,
        4,
        renormalize=True,
        scores="sigmoid",
        scale=2.5,
        n_groups=8,
        groups_per_token=3,
        group_score_top=2,
        selection_bias_E=router.e_score_correction_bias,
    )
    dense, ours = (
        torch.zeros(50, 32).scatter(-1, places, values) for places, values in ((choices, expected), (indices, weights))
    )
    torch.testing.assert_close(ours, dense, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 1, 7, 129, 1000])
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_counts(experts: int, top_k: int, tokens: int) -> None:
    indices = random_choices(tokens, experts, top_k, seed=tokens)
    counts = count_experts(indices, experts)
    assert counts.dtype == torch.long
    assert torch.equal(counts, torch.bincount(indices.flatten(), minlength=experts))
    for mask in (torch.zeros(tokens, dtype=torch.bool), torch.ones(tokens, dtype=torch.bool), torch.rand(tokens) < 0.5):
        counted = count_experts(indices, experts, mask)
        assert torch.equal(counted, torch.bincount(indices[mask].flatten(), minlength=experts))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"indices_TK": torch.zeros(9, 3, dtype=torch.long)}, r"\(9, 3\).*\(9, 2\)"),
        ({"scores": "softplus"}, "softplus.*softmax, sigmoid"),
        ({"n_groups": 4}, "6 experts in 4 groups"),
        ({"n_groups": 3, "groups_per_token": 4}, "uses 4"),
        ({"n_groups": 6, "groups_per_token": 2, "group_score_top": 2}, "group of 1 experts .* best 2"),
        ({"n_groups": 6, "groups_per_token": 1}, "2 experts per token do not fit into 1 groups of 1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        topk_gate(torch.randn(9, 6), 2, renormalize=True, **arguments)


def test_opcheck() -> None:
    logits = spaced_logits(7, 16).requires_grad_()
    bias, recorded = torch.rand(16), random_choices(7, 16, 4)
    for bias_E, recorded_TK in ((None, None), (bias, recorded)):
        torch.library.opcheck(_gate, (logits, 4, True, True, 2.5, 4, 2, 2, bias_E, recorded_TK))
    torch.library.opcheck(_gate_backward, (torch.randn(7, 4), logits.detach(), recorded, False, True, 1.0))
    for mask in (None, torch.rand(7) < 0.5):
        torch.library.opcheck(_count, (recorded, 16, mask))


@pytest.mark.parametrize("gate", ["qwen3", "deepseek_v3"])
def test_compiles_without_a_graph_break(gate: str) -> None:
    arguments = options(gate, 32, 4)

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, indices = topk_gate(x, 4, **arguments)
        return weights.square().sum(), count_experts(indices, 32)

    def run(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        logits = spaced_logits(7, 32).requires_grad_()
        value, counts = function(logits)
        value.backward()
        assert logits.grad is not None
        return value, counts, logits.grad

    for ours, plain in zip(run(torch.compile(loss, backend="aot_eager", fullgraph=True)), run(loss), strict=True):
        assert torch.equal(ours, plain)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(RuntimeError):
        count_experts(torch.zeros(8, 2, dtype=torch.long), 4, torch.ones(3, dtype=torch.bool))
