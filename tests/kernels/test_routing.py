"""The top-k gate and its counts, reference and C++, against float64, transformers and closed cases.

Tolerances: choices and counts equal; weights 1e-6 relative and absolute (1e-12 for fp64 logits); gradients likewise,
but 8e-3 relative for bf16 and 1e-3 for fp16 logits, to which they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import IMPLEMENTATIONS, noted, use
from moe_cases import SIZES, TOKENS, choices, random_choices
from routing_cases import GATES, GRADIENT, assert_equals_truth, options, spaced_logits, true_choices, true_weights
from torch import Tensor

from archon_kernels.routing import _count, _gate, _gate_backward, count_experts, topk_gate


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use(request.param, monkeypatch)


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
@pytest.mark.parametrize("gate", GATES)
def test_gate_equals_float64(gate: str, experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = options(gate, experts, top_k)
    for tokens in TOKENS:
        logits = spaced_logits(tokens, experts, seed=tokens)
        right = true_choices(logits, top_k, **arguments)
        for implementation in IMPLEMENTATIONS:
            use(implementation, monkeypatch)
            for dtype in GRADIENT if tokens < 1000 else (torch.float32, torch.bfloat16):
                with noted(tokens=tokens, implementation=implementation, dtype=dtype):
                    assert_equals_truth(logits.to(dtype), top_k, arguments, right)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
@pytest.mark.parametrize("gate", ["qwen3", "deepseek_v3"])
def test_all_tokens_to_one_expert(gate: str, experts: int, top_k: int) -> None:
    """Chosen by all tokens, and recorded as each of the K choices of all of them."""
    expert, bias = experts // 2, torch.zeros(experts)
    bias[expert] = 4.0  # so that its group wins as well
    arguments = options(gate, experts, top_k) | {"selection_bias_E": bias}
    for tokens in TOKENS:
        logits = spaced_logits(tokens, experts)
        logits[:, expert] = 32.0
        recorded = choices(tokens, experts, top_k, skewed=True)
        for dtype in (torch.float32, torch.bfloat16):
            with noted(tokens=tokens, dtype=dtype):
                indices = topk_gate(logits.to(dtype), top_k, **arguments)[1]
                assert bool((indices[:, 0] == expert).all()) and bool((indices[:, 1:] != expert).all())
                assert count_experts(indices, experts)[expert] == tokens
                assert_equals_truth(logits.to(dtype), top_k, arguments, indices)
                assert_equals_truth(logits.to(dtype), top_k, arguments | {"indices_TK": recorded}, recorded)


@pytest.mark.parametrize("gate", GATES)
def test_recorded_choices_are_weighed_by_the_current_logits(gate: str, implementation: None) -> None:
    """Also those that name an expert twice, and those of -1, for which the gate puts its own in their place."""
    recorded = random_choices(21, 16, 4)
    recorded[3] = recorded[3, 0]
    recorded[6:11] = -1
    recorded[12:15, 2] = -1
    assert_equals_truth(spaced_logits(21, 16), 4, {**options(gate, 16, 4), "indices_TK": recorded})


@pytest.mark.parametrize("gate", GATES)
def test_gradient_equals_finite_differences(gate: str, implementation: None) -> None:
    arguments = {**options(gate, 16, 4), "indices_TK": random_choices(5, 16, 4)}
    logits = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: topk_gate(x, 4, **arguments)[0], logits)


@pytest.mark.parametrize("gate", ["softmax", "qwen3", "deepseek_v2", "sigmoid"])
def test_of_equal_scores_the_first_experts_and_groups_win(gate: str, implementation: None) -> None:
    arguments = options(gate, 64, 4)
    for values in (torch.zeros(3, 64), torch.arange(64).flip(0).expand(3, 64) // 9 / 4):
        for dtype in (torch.float32, torch.bfloat16):
            _, indices = topk_gate(values.to(dtype), 4, **arguments)
            assert torch.equal(indices, true_choices(values, 4, **arguments))
    assert topk_gate(torch.zeros(1, 64), 4, **arguments)[1].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_extreme_logits(scores: Any, implementation: None) -> None:
    """No overflow on the way, and tokens whose logits are not numbers still get K different experts."""
    logits = torch.tensor([[300.0, -300.0, 0.0, 299.0], [-300.0, -301.0, -300.5, -90.0], [-torch.inf, 1.0, 0.5, 0.0]])
    weights, indices = topk_gate(logits, 2, renormalize=False, scores=scores)
    expected = true_weights(logits, indices, renormalize=False, scores=scores)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-37)
    _, indices = topk_gate(torch.full((2, 4), torch.nan), 3, renormalize=True, scores=scores)
    assert indices.tolist() == [[0, 1, 2]] * 2


def test_a_selection_bias_moves_the_choice_and_not_the_weights(implementation: None) -> None:
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor([0.0, 2.0, 0.0, -2.0, 0.0, 1.5])
    weights, indices = topk_gate(logits, 2, renormalize=True, selection_bias_E=bias)
    assert torch.equal(indices, torch.tensor([[1, 5]]).expand(9, 2))  # a probability is at most 1
    assert torch.equal(weights, topk_gate(logits, 2, renormalize=True, indices_TK=indices)[0])


def test_recorded_choices_win_over_a_selection_bias(implementation: None) -> None:
    logits, recorded, bias = torch.randn(9, 6), random_choices(9, 6, 2), torch.tensor([5.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    recorded[4:] = -1
    _, indices = topk_gate(logits, 2, renormalize=True, selection_bias_E=bias, indices_TK=recorded)
    assert torch.equal(indices[:4], recorded[:4]) and torch.equal(indices[4:], torch.tensor([[0, 1]]).expand(5, 2))


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_gate_hf_parity_qwen3(norm_topk_prob: bool, implementation: None) -> None:
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


def test_gate_hf_parity_deepseek_v3(implementation: None) -> None:
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


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_counts(experts: int, top_k: int) -> None:
    for tokens in TOKENS:
        some = torch.rand(tokens, generator=torch.Generator().manual_seed(tokens)) < 0.5
        for skewed in (False, True):
            indices = choices(tokens, experts, top_k, skewed)
            for mask in (None, torch.zeros_like(some), torch.ones_like(some), some):
                with noted(tokens=tokens, skewed=skewed, mask=mask):
                    counted = count_experts(indices, experts, mask)
                    kept = indices if mask is None else indices[mask]
                    assert counted.dtype == torch.long
                    assert torch.equal(counted, torch.bincount(kept.flatten(), minlength=experts))


def test_choices_of_another_dtype_are_refused(implementation: None) -> None:
    narrow = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expert choices are torch.int32: pass int64"):
        count_experts(narrow, 4)
    with pytest.raises(ValueError, match=r"expert choices are torch.int32: pass int64"):
        topk_gate(torch.zeros(3, 4), 1, renormalize=True, indices_TK=narrow)


def test_an_expert_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use("cpp", monkeypatch)
    for expert in (4, -1):
        with pytest.raises(RuntimeError, match=rf"expert {expert} is not in \[0, 4\)"):
            count_experts(torch.tensor([[0], [expert]]), 4)
    with pytest.raises(RuntimeError, match=r"recorded expert 4 is not in \[0, 4\)"):
        topk_gate(torch.zeros(2, 4), 1, renormalize=True, indices_TK=torch.tensor([[0], [4]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"indices_TK": torch.zeros(9, 3, dtype=torch.long)}, r"\(9, 3\).*\(9, 2\)"),
        ({"selection_bias_E": torch.zeros(2)}, r"bias has shape \(2,\), the router has 6 experts"),
        ({"selection_bias_E": torch.zeros(6, 1)}, r"bias has shape \(6, 1\)"),
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


def test_opcheck(implementation: None) -> None:
    logits = spaced_logits(7, 16).requires_grad_()
    bias, recorded = torch.rand(16), random_choices(7, 16, 4)
    for bias_E, recorded_TK in ((None, None), (bias, recorded)):
        torch.library.opcheck(_gate, (logits, 4, True, True, 2.5, 4, 2, 2, bias_E, recorded_TK))
    torch.library.opcheck(_gate_backward, (torch.randn(7, 4), logits.detach(), recorded, False, True, 1.0))
    for mask in (None, torch.rand(7) < 0.5):
        torch.library.opcheck(_count, (recorded, 16, mask))


@pytest.mark.parametrize("gate", ["qwen3", "deepseek_v3"])
def test_compiles_without_a_graph_break(gate: str, implementation: None) -> None:
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


def test_a_mask_of_another_length_is_refused(implementation: None) -> None:
    with pytest.raises(RuntimeError):
        count_experts(torch.zeros(8, 2, dtype=torch.long), 4, torch.ones(3, dtype=torch.bool))


def test_backward_of_other_choices_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    use("cpp", monkeypatch)
    logits = torch.zeros(2, 4)
    arguments: tuple[bool, bool, float] = (False, False, 1.0)
    with pytest.raises(RuntimeError, match=r"expert 9 is not in \[0, 4\)"):
        torch.ops.archon_cpp.topk_gate_backward(torch.ones(2, 1), logits, torch.tensor([[0], [9]]), *arguments)
    with pytest.raises(RuntimeError, match=r"gradients \[1, 1\] of choices \[2, 1\] of 2 tokens"):
        torch.ops.archon_cpp.topk_gate_backward(torch.ones(1, 1), logits, torch.tensor([[0], [3]]), *arguments)
