"""Top-k gate of a mixture of experts, and how many tokens each expert gets."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from archon_kernels.dispatch import choose, implementations
from archon_kernels.dtypes import check_choices, wide_dtype

Scores = Literal["softmax", "sigmoid"]
SCORES: tuple[Scores, ...] = get_args(Scores)

SCORE_BOUND = 1e38
"""Selection scores are clamped to ± this and NaN counts as the lowest, so that every token gets K different experts and
the sum of two scores stays finite."""

SIGMOID_EPSILON = 1e-20
"""Added to the sum that renormalised sigmoid weights are divided by, as DeepSeek-V3 does; softmax has no need of it."""


def topk_gate(
    logits_TE: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    scores: Scores = "softmax",
    scale: float = 1.0,
    n_groups: int = 1,
    groups_per_token: int = 1,
    group_score_top: int = 1,
    selection_bias_E: Tensor | None = None,
    indices_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts by a score of its logits, and weigh them by it (Qwen3, DeepSeek-V2, -V3 reports).

    Args:
        logits_TE: ``[T, E]`` router logits, any float dtype; scores are computed in fp32 (fp64 for fp64).
        top_k: experts per token, K.
        renormalize: divide the chosen scores by their sum.
        scores: ``softmax`` over all experts, or ``sigmoid`` of each logit.
        scale: factor of the weights, after renormalisation.
        n_groups: groups of ``E / n_groups`` neighbouring experts, of which a token uses ``groups_per_token``.
        group_score_top: a group is judged by the sum of its best 1 (DeepSeek-V2) or 2 (DeepSeek-V3) selection scores.
        selection_bias_E: ``[E]`` added to the scores for the choice of groups and experts only (arXiv 2408.15664).
        indices_TK: ``[T, K]`` int64 recorded choices to use instead of the best K; an entry of -1 takes the choice that
            would have been made in its place. The weights still come from the logits.

    Returns:
        ``weights [T, K]`` fp32 (fp64 for fp64) with gradient to the logits, and ``indices [T, K]`` int64 by descending
        selection score; of equal groups or experts the one with the lower number comes first.

    Raises:
        ValueError: recorded choices of another shape than ``[T, K]`` or dtype than int64, a bias of another than
            ``[E]``, an unknown score, or groups that do not divide the experts, do not exist, or hold too few experts.
    """
    _check(logits_TE, top_k, scores, n_groups, groups_per_token, group_score_top, selection_bias_E, indices_TK)
    return _gate(
        logits_TE,
        top_k,
        scores == "sigmoid",
        renormalize,
        scale,
        n_groups,
        groups_per_token,
        group_score_top,
        selection_bias_E,
        indices_TK,
    )


def count_experts(indices_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """Choices that fell on each expert: ``[E]`` int64. No host synchronisation.

    Args:
        indices_TK: ``[T, K]`` int64 in [0, num_experts); T may be 0.
        mask_T: ``[T]`` bool, False for tokens that do not count.

    Raises:
        ValueError: choices that are not int64.
    """
    check_choices(indices_TK)
    return _count(indices_TK, num_experts, mask_T)


def _check(
    logits_TE: Tensor,
    top_k: int,
    scores: str,
    n_groups: int,
    groups_per_token: int,
    group_score_top: int,
    bias_E: Tensor | None,
    recorded_TK: Tensor | None,
) -> None:
    tokens, experts = logits_TE.shape
    if bias_E is not None and bias_E.shape != (experts,):
        raise ValueError(f"the selection bias has shape {tuple(bias_E.shape)}, the router has {experts} experts")
    if scores not in SCORES:
        raise ValueError(f"router scores are {scores!r}; they are one of {', '.join(SCORES)}")
    if n_groups < 1 or experts % n_groups or not 1 <= groups_per_token <= n_groups:
        raise ValueError(
            f"{experts} experts in {n_groups} groups, of which a token uses {groups_per_token}: the number of groups "
            "must divide that of experts and be no smaller than the groups of a token"
        )
    size = experts // n_groups
    if group_score_top not in (1, 2) or group_score_top > size:
        raise ValueError(f"a group of {size} experts is judged by its best {group_score_top}; it is 1, or 2 of several")
    if not 1 <= top_k <= groups_per_token * size:
        raise ValueError(f"{top_k} experts per token do not fit into {groups_per_token} groups of {size}")
    if recorded_TK is None:
        return
    check_choices(recorded_TK)
    if recorded_TK.shape != (tokens, top_k):
        raise ValueError(
            f"recorded expert choices have shape {tuple(recorded_TK.shape)}, the router needs {(tokens, top_k)}"
        )


def _reference_gate(
    logits_TE: Tensor,
    top_k: int,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    n_groups: int,
    groups_per_token: int,
    group_score_top: int,
    bias_E: Tensor | None,
    recorded_TK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    scores_TE = _scores(logits_TE, sigmoid)
    selection_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
    selection_TE = selection_TE.nan_to_num(-SCORE_BOUND).clamp(-SCORE_BOUND, SCORE_BOUND)
    if groups_per_token < n_groups:
        grouped_TGM = selection_TE.unflatten(-1, (n_groups, -1))
        group_scores_TG = grouped_TGM.topk(group_score_top, dim=-1).values.sum(-1)
        closed_TG = torch.ones_like(group_scores_TG, dtype=torch.bool)
        closed_TG.scatter_(-1, _largest(group_scores_TG, groups_per_token), False)
        selection_TE = grouped_TGM.masked_fill(closed_TG.unsqueeze(-1), -torch.inf).flatten(1)
    indices_TK = _largest(selection_TE, top_k)
    if recorded_TK is not None:
        indices_TK = torch.where(recorded_TK < 0, indices_TK, recorded_TK)
    weights_TK = scores_TE.gather(-1, indices_TK)
    if renormalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _epsilon(sigmoid))
    return weights_TK * scale, indices_TK


def _reference_gate_backward(
    grad_TK: Tensor, logits_TE: Tensor, indices_TK: Tensor, sigmoid: bool, renormalize: bool, scale: float
) -> Tensor:
    scores_TE = _scores(logits_TE, sigmoid)
    zeros_TE = torch.zeros_like(scores_TE)
    # Recorded choices may name an expert twice: its scores, and what comes back to them, count twice too.
    grad_TE = zeros_TE.scatter_add(-1, indices_TK, grad_TK.to(scores_TE.dtype))
    if renormalize:
        times_TE = zeros_TE.scatter_add(-1, indices_TK, torch.ones_like(indices_TK, dtype=scores_TE.dtype))
        total_T1 = (times_TE * scores_TE).sum(-1, keepdim=True) + _epsilon(sigmoid)
        mean_T1 = (grad_TE * scores_TE).sum(-1, keepdim=True) / total_T1
        grad_TE = (grad_TE - times_TE * mean_T1) / total_T1
    grad_TE = grad_TE * scale
    if sigmoid:
        return (grad_TE * scores_TE * (1 - scores_TE)).to(logits_TE.dtype)
    return (scores_TE * (grad_TE - (grad_TE * scores_TE).sum(-1, keepdim=True))).to(logits_TE.dtype)


def _reference_count(indices_TK: Tensor, num_experts: int, mask_T: Tensor | None) -> Tensor:
    counts_E = torch.zeros(num_experts, dtype=torch.long, device=indices_TK.device)
    ones_TK = torch.ones_like(indices_TK) if mask_T is None else mask_T.long().unsqueeze(-1).expand_as(indices_TK)
    return counts_E.scatter_add_(0, indices_TK.flatten(), ones_TK.flatten())


def _scores(logits_TE: Tensor, sigmoid: bool) -> Tensor:
    wide_TE = logits_TE.to(wide_dtype(logits_TE))
    return wide_TE.sigmoid() if sigmoid else wide_TE.softmax(-1)


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices of the largest values of each row; unlike ``topk``, the first of equal ones comes first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _epsilon(sigmoid: bool) -> float:
    return SIGMOID_EPSILON if sigmoid else 0.0


_GATE = implementations(_reference_gate, cpp="topk_gate", triton="routing.gate")
_GATE_BACKWARD = implementations(_reference_gate_backward, cpp="topk_gate_backward", triton="routing.gate_backward")
_COUNT = implementations(_reference_count, cpp="count_experts", triton="routing.count")


@torch.library.custom_op("archon::topk_gate", mutates_args=())
def _gate(
    logits_TE: Tensor,
    top_k: int,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    n_groups: int,
    groups_per_token: int,
    group_score_top: int,
    bias_E: Tensor | None,
    recorded_TK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    groups = (n_groups, groups_per_token, group_score_top)
    implementation = choose(_GATE, logits_TE.device)
    return implementation(logits_TE, top_k, sigmoid, renormalize, scale, *groups, bias_E, recorded_TK)


@_gate.register_fake
def _(logits_TE: Tensor, top_k: int, *_: Any) -> tuple[Tensor, Tensor]:
    shape = (logits_TE.shape[0], top_k)
    return logits_TE.new_empty(shape, dtype=wide_dtype(logits_TE)), logits_TE.new_empty(shape, dtype=torch.long)


@torch.library.custom_op("archon::topk_gate_backward", mutates_args=())
def _gate_backward(
    grad_TK: Tensor, logits_TE: Tensor, indices_TK: Tensor, sigmoid: bool, renormalize: bool, scale: float
) -> Tensor:
    implementation = choose(_GATE_BACKWARD, logits_TE.device)
    return implementation(grad_TK, logits_TE, indices_TK, sigmoid, renormalize, scale)


@_gate_backward.register_fake
def _(grad_TK: Tensor, logits_TE: Tensor, *_: Any) -> Tensor:
    return logits_TE.new_empty(logits_TE.shape)


def _save_gate(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits_TE, _, ctx.sigmoid, ctx.renormalize, ctx.scale, *_ = inputs
    # The scores are computed again in backward: saving them would cost as much memory as the logits.
    ctx.save_for_backward(logits_TE, output[1])


def _grad_gate(ctx: Any, grad_TK: Tensor, _: None) -> tuple[Tensor | None, ...]:
    grad_TE = _gate_backward(grad_TK, *ctx.saved_tensors, ctx.sigmoid, ctx.renormalize, ctx.scale)
    return grad_TE, *[None] * 9


_gate.register_autograd(_grad_gate, setup_context=_save_gate)


@torch.library.custom_op("archon::count_experts", mutates_args=())
def _count(indices_TK: Tensor, num_experts: int, mask_T: Tensor | None) -> Tensor:
    return choose(_COUNT, indices_TK.device)(indices_TK, num_experts, mask_T)


@_count.register_fake
def _(indices_TK: Tensor, num_experts: int, mask_T: Tensor | None) -> Tensor:
    return indices_TK.new_empty(num_experts)
