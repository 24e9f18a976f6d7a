"""The gate in float64 by plain sorting, and inputs whose choices do not hang on rounding; for the tests of routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archon_kernels.routing import topk_gate

GATES: dict[str, dict[str, Any]] = {
    "softmax": {"renormalize": False},
    "qwen3": {"renormalize": True},
    "biased": {"renormalize": True, "bias": True},
    "deepseek_v2": {"renormalize": False, "scale": 16.0, "n_groups": 8, "groups_per_token": 3},
    "deepseek_v3": {
        "renormalize": True,
        "scores": "sigmoid",
        "scale": 2.5,
        "n_groups": 8,
        "groups_per_token": 4,
        "group_score_top": 2,
        "bias": True,
    },
    "sigmoid": {"renormalize": False, "scores": "sigmoid"},
}
"""Arguments of ``topk_gate``; ``bias`` stands for a bias of the choice."""


GRADIENT = {
    torch.float32: (1e-6, 1e-6),
    torch.bfloat16: (8e-3, 1e-6),
    torch.float16: (1e-3, 1e-6),
    torch.float64: (1e-12, 1e-12),
}
"""Relative and absolute tolerance of a gradient, by the dtype of the logits, to which it is rounded; the interpreter of
Triton cuts off what bf16 has no room for."""


def options(gate: str, experts: int, top_k: int) -> dict[str, Any]:
    """The arguments of a gate, with as many of its groups as the experts allow."""
    chosen = dict(GATES[gate])
    if chosen.pop("bias", False):
        chosen["selection_bias_E"] = (torch.arange(experts) * 7 % 3) * 0.5
    n_groups = chosen.get("n_groups", 1)
    if experts // n_groups * chosen.get("groups_per_token", 1) < top_k or experts // n_groups < 2:
        for name in ("n_groups", "groups_per_token", "group_score_top"):
            chosen.pop(name, None)
    return chosen


def spaced_logits(tokens: int, experts: int, seed: int = 0) -> Tensor:
    """``[T, E]`` logits 1/32 apart or more, exact in every dtype; positive, as sigmoids add up to 1 in pairs of ± x."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(-1)
    return (order + 1) / 32


def true_choices(
    logits: Tensor,
    top_k: int,
    *,
    scores: str = "softmax",
    n_groups: int = 1,
    groups_per_token: int = 1,
    group_score_top: int = 1,
    selection_bias_E: Tensor | None = None,
    indices_TK: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The choices of ``topk_gate``, made in float64 by Python's sort one token at a time."""
    experts = logits.shape[1]
    size = experts // n_groups
    members = [range(group * size, (group + 1) * size) for group in range(n_groups)]
    values = _scores(logits, scores) + (0.0 if selection_bias_E is None else selection_bias_E.double())
    rows = []
    for token, selection in enumerate(values.tolist()):
        allowed: Sequence[int] = range(experts)
        if groups_per_token < n_groups:
            judged = [sum(sorted((selection[e] for e in member), reverse=True)[:group_score_top]) for member in members]
            groups = sorted(range(n_groups), key=lambda group: (-judged[group], group))[:groups_per_token]
            allowed = sorted(e for group in groups for e in members[group])
        own = sorted(allowed, key=selection.__getitem__, reverse=True)[:top_k]  # stable, so the first of equal ones
        recorded = [-1] * top_k if indices_TK is None else indices_TK[token].tolist()
        rows.append([mine if given < 0 else given for mine, given in zip(own, recorded, strict=True)])
    return torch.tensor(rows, dtype=torch.long).view(len(rows), top_k)


def true_weights(
    logits: Tensor, indices: Tensor, *, renormalize: bool, scores: str = "softmax", scale: float = 1.0, **_: Any
) -> Tensor:
    """The weights of ``topk_gate`` for its choices, in float64."""
    weights = _scores(logits, scores).gather(-1, indices)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if scores == "sigmoid" else 0.0))
    return weights * scale


def _scores(logits: Tensor, scores: str) -> Tensor:
    logits = logits.double()
    return logits.softmax(-1) if scores == "softmax" else 1 / (1 + (-logits).exp())


def assert_equals_truth(logits: Tensor, top_k: int, arguments: dict[str, Any], choices: Tensor | None = None) -> None:
    """Weights, choices and gradient; the true choices take time, so that whoever has them may pass them."""
    dtype = logits.dtype
    logits = logits.clone().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    weights, indices = topk_gate(logits, top_k, **arguments)
    choices = true_choices(logits.detach(), top_k, **arguments) if choices is None else choices
    expected = true_weights(exact, choices, **arguments)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert indices.dtype == torch.long and torch.equal(indices, choices)
    close = 1e-12 if dtype == torch.float64 else 1e-6
    scale = arguments.get("scale", 1.0)
    torch.testing.assert_close(weights.double(), expected, rtol=close, atol=close * scale)
    pull = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)).to(weights.dtype)
    weights.backward(pull)
    expected.backward(pull.double())
    assert logits.grad is not None and exact.grad is not None and logits.grad.dtype == dtype
    relative, absolute = GRADIENT[dtype]
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=relative, atol=absolute * scale)
