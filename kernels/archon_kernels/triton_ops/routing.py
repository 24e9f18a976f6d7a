"""Top-k gate and counts per expert: a program takes a tile of tokens with all their experts in registers."""

# Kernels have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from archon_kernels.routing import SCORE_BOUND, SIGMOID_EPSILON
from archon_kernels.triton_ops import Compiled

_TILE = 2048
"""Scores that a program holds; with 4 warps these are 16 registers a thread for each tile."""

_COUNT_PAIRS, _COUNT_STEP = 1024, 16
"""Choices that a program counts, and how many of them at once."""

_BOUND = tl.constexpr(SCORE_BOUND)
_EPSILON = tl.constexpr(SIGMOID_EPSILON)


@triton.jit
def _load_scores(logits, row_T, col_E, tokens, experts, SIGMOID: tl.constexpr, WIDE: tl.constexpr):
    """Scores of a tile of rows, 0 in columns that are no experts."""
    is_expert = (col_E < experts)[None, :]
    there = (row_T < tokens)[:, None] & is_expert
    x_TE = tl.load(logits + row_T[:, None] * experts + col_E[None, :], mask=there, other=0.0).to(WIDE)
    if SIGMOID:
        scores_TE = 1.0 / (1.0 + tl.exp(-x_TE))
    else:
        x_TE = tl.where(is_expert, x_TE, float("-inf"))
        exp_TE = tl.exp(x_TE - tl.max(x_TE, 1)[:, None])
        scores_TE = exp_TE / tl.sum(exp_TE, 1)[:, None]
    return tl.where(is_expert, scores_TE, 0.0)


@triton.jit
def _first_largest(x_TE, col_E, WIDTH: tl.constexpr):
    """Column of each row's largest value, the first of equal ones."""
    return tl.min(tl.where(x_TE == tl.max(x_TE, 1)[:, None], col_E[None, :], WIDTH), 1)


@triton.jit
def _gate(
    logits,
    bias,
    recorded,
    weights,
    indices,
    scale,
    tokens,
    experts,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    N_GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    GROUP_SCORE_TOP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    WIDE: tl.constexpr = weights.dtype.element_ty
    row_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col_E = tl.arange(0, BLOCK_E)
    col_K = tl.arange(0, BLOCK_K)
    real_T = row_T < tokens
    scores_TE = _load_scores(logits, row_T, col_E, tokens, experts, SIGMOID, WIDE)
    selection_TE = scores_TE
    if bias is not None:
        selection_TE += tl.load(bias + col_E, mask=col_E < experts, other=0.0).to(WIDE)[None, :]
    selection_TE = tl.where(selection_TE > -_BOUND, selection_TE, -_BOUND)  # NaN too
    selection_TE = tl.where(selection_TE < _BOUND, selection_TE, _BOUND)
    selection_TE = tl.where((col_E < experts)[None, :], selection_TE, float("-inf"))

    if GROUPS_PER_TOKEN < N_GROUPS:
        group_E = col_E // (experts // N_GROUPS)
        col_G = tl.arange(0, BLOCK_G)
        group_scores_TG = tl.full((BLOCK_T, BLOCK_G), float("-inf"), WIDE)
        for group in range(N_GROUPS):
            member_TE = tl.where((group_E == group)[None, :], selection_TE, float("-inf"))
            score_T = tl.max(member_TE, 1)
            if GROUP_SCORE_TOP == 2:
                best_T = _first_largest(member_TE, col_E, BLOCK_E)
                score_T += tl.max(tl.where(col_E[None, :] == best_T[:, None], float("-inf"), member_TE), 1)
            group_scores_TG = tl.where((col_G == group)[None, :], score_T[:, None], group_scores_TG)
        open_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
        for _ in range(GROUPS_PER_TOKEN):
            best_T = _first_largest(group_scores_TG, col_G, BLOCK_G)
            group_scores_TG = tl.where(col_G[None, :] == best_T[:, None], float("-inf"), group_scores_TG)
            open_TE += (group_E[None, :] == best_T[:, None]).to(tl.int32)
        selection_TE = tl.where(open_TE > 0, selection_TE, float("-inf"))

    weights_TK = tl.zeros((BLOCK_T, BLOCK_K), WIDE)
    indices_TK = tl.zeros((BLOCK_T, BLOCK_K), tl.int64)
    for k in range(TOP_K):
        best_T = _first_largest(selection_TE, col_E, BLOCK_E)
        selection_TE = tl.where(col_E[None, :] == best_T[:, None], float("-inf"), selection_TE)
        expert_T = best_T.to(tl.int64)
        if recorded is not None:
            recorded_T = tl.load(recorded + row_T * TOP_K + k, mask=real_T, other=-1)
            expert_T = tl.where(recorded_T < 0, expert_T, recorded_T)
        weight_T = tl.sum(tl.where(col_E[None, :] == expert_T[:, None], scores_TE, 0.0), 1)
        weights_TK = tl.where((col_K == k)[None, :], weight_T[:, None], weights_TK)
        indices_TK = tl.where((col_K == k)[None, :], expert_T[:, None], indices_TK)
    if RENORMALIZE:
        total_T = tl.sum(weights_TK, 1)
        if SIGMOID:
            total_T += _EPSILON
        weights_TK = weights_TK / total_T[:, None]
    out_TK = row_T[:, None] * TOP_K + col_K[None, :]
    stored = real_T[:, None] & (col_K < TOP_K)[None, :]
    tl.store(weights + out_TK, weights_TK * scale, mask=stored)
    tl.store(indices + out_TK, indices_TK, mask=stored)


@triton.jit
def _gate_backward(
    grads,
    logits,
    indices,
    out,
    scale,
    tokens,
    experts,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    WIDE: tl.constexpr = grads.dtype.element_ty
    row_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col_E = tl.arange(0, BLOCK_E)
    real_T = row_T < tokens
    scores_TE = _load_scores(logits, row_T, col_E, tokens, experts, SIGMOID, WIDE)
    grad_TE = tl.zeros((BLOCK_T, BLOCK_E), WIDE)
    times_TE = tl.zeros((BLOCK_T, BLOCK_E), WIDE)
    for k in range(TOP_K):
        expert_T = tl.load(indices + row_T * TOP_K + k, mask=real_T, other=0)
        grad_T = tl.load(grads + row_T * TOP_K + k, mask=real_T, other=0.0)
        hit_TE = col_E[None, :] == expert_T[:, None]
        grad_TE += tl.where(hit_TE, grad_T[:, None], 0.0)
        times_TE += tl.where(hit_TE, 1.0, 0.0)
    if RENORMALIZE:
        total_T = tl.sum(times_TE * scores_TE, 1)
        if SIGMOID:
            total_T += _EPSILON
        mean_T = tl.sum(grad_TE * scores_TE, 1) / total_T
        grad_TE = (grad_TE - times_TE * mean_T[:, None]) / total_T[:, None]
    grad_TE = grad_TE * scale
    if SIGMOID:
        grad_TE = grad_TE * scores_TE * (1.0 - scores_TE)
    else:
        grad_TE = scores_TE * (grad_TE - tl.sum(grad_TE * scores_TE, 1)[:, None])
    stored = real_T[:, None] & (col_E < experts)[None, :]
    tl.store(out + row_T[:, None] * experts + col_E[None, :], grad_TE.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _count(
    indices,
    counted,
    counts,
    pairs,
    experts,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Each program counts its own part of the pairs into its own row, so no two write to one place."""
    col_E = tl.arange(0, BLOCK_E)
    count_E = tl.zeros((BLOCK_E,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * PAIRS
    for start in range(0, PAIRS, STEP):
        pair_P = first + start + tl.arange(0, STEP)
        expert_P = tl.load(indices + pair_P, mask=pair_P < pairs, other=-1)
        if counted is not None:
            counted_P = tl.load(counted + pair_P // TOP_K, mask=pair_P < pairs, other=0)
            expert_P = tl.where(counted_P != 0, expert_P, -1)
        count_E += tl.sum((expert_P[:, None] == col_E[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0).to(tl.int64) * experts + col_E, count_E, mask=col_E < experts)


def gate(
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
    """The op ``archon::topk_gate``."""
    logits_TE = logits_TE.contiguous()
    tokens, experts = logits_TE.shape
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    weights_TK = logits_TE.new_empty((tokens, top_k), dtype=wide)
    indices_TK = logits_TE.new_empty((tokens, top_k), dtype=torch.long)
    if tokens:
        block_t, block_e = _blocks(experts)
        _gate[(triton.cdiv(tokens, block_t),)](
            logits_TE,
            None if bias_E is None else bias_E.contiguous(),
            None if recorded_TK is None else recorded_TK.contiguous(),
            weights_TK,
            indices_TK,
            scale,
            tokens,
            experts,
            TOP_K=top_k,
            SIGMOID=sigmoid,
            RENORMALIZE=renormalize,
            N_GROUPS=n_groups,
            GROUPS_PER_TOKEN=groups_per_token,
            GROUP_SCORE_TOP=group_score_top,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
            BLOCK_G=triton.next_power_of_2(n_groups),
            BLOCK_K=triton.next_power_of_2(top_k),
        )
    return weights_TK, indices_TK


def gate_backward(
    grad_TK: Tensor, logits_TE: Tensor, indices_TK: Tensor, sigmoid: bool, renormalize: bool, scale: float
) -> Tensor:
    """The op ``archon::topk_gate_backward``."""
    logits_TE, indices_TK = logits_TE.contiguous(), indices_TK.contiguous()
    tokens, experts = logits_TE.shape
    grad_TE = torch.empty_like(logits_TE)
    if tokens:
        block_t, block_e = _blocks(experts)
        _gate_backward[(triton.cdiv(tokens, block_t),)](
            grad_TK.to(torch.promote_types(logits_TE.dtype, torch.float32)).contiguous(),
            logits_TE,
            indices_TK,
            grad_TE,
            scale,
            tokens,
            experts,
            TOP_K=indices_TK.shape[1],
            SIGMOID=sigmoid,
            RENORMALIZE=renormalize,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
        )
    return grad_TE


def count(indices_TK: Tensor, num_experts: int, mask_T: Tensor | None) -> Tensor:
    """The op ``archon::count_experts``."""
    pairs = indices_TK.numel()
    programs = triton.cdiv(pairs, _COUNT_PAIRS)
    counts_PE = indices_TK.new_empty((programs, num_experts), dtype=torch.int32)
    if pairs:
        _count[(programs,)](
            indices_TK.contiguous(),
            None if mask_T is None else mask_T.contiguous().view(torch.uint8),
            counts_PE,
            pairs,
            num_experts,
            TOP_K=indices_TK.shape[1],
            BLOCK_E=_blocks(num_experts)[1],
            PAIRS=_COUNT_PAIRS,
            STEP=_COUNT_STEP,
        )
    return counts_PE.sum(0)


def _blocks(experts: int) -> tuple[int, int]:
    """Tokens and (padded) experts of a tile."""
    block_e = max(16, triton.next_power_of_2(experts))
    return max(1, _TILE // block_e), block_e


def _compiled() -> tuple[Compiled, ...]:
    """Qwen3-30B-A3B (128 experts, softmax) and DeepSeek-V3 (256 in groups, sigmoid), with bias and recorded choices."""
    return (
        *_entries(experts=128, sigmoid=False, groups=(1, 1, 1), storage="fp32"),
        *_entries(experts=128, sigmoid=False, groups=(1, 1, 1), storage="bf16"),
        *_entries(experts=256, sigmoid=True, groups=(8, 4, 2), storage="fp32"),
        _count_entry(experts=256),
    )


def _entries(experts: int, sigmoid: bool, groups: tuple[int, int, int], storage: str) -> tuple[Compiled, Compiled]:
    """Forward and backward of a gate, top 8."""
    block_t, block_e = _blocks(experts)
    shared = {"TOP_K": 8, "SIGMOID": sigmoid, "RENORMALIZE": True, "BLOCK_T": block_t, "BLOCK_E": block_e}
    chosen = dict(zip(("N_GROUPS", "GROUPS_PER_TOKEN", "GROUP_SCORE_TOP"), groups, strict=True))
    chosen |= {**shared, "BLOCK_G": triton.next_power_of_2(groups[0]), "BLOCK_K": 8}
    sizes = {"scale": "fp32", "tokens": "i32", "experts": "i32"}
    forward = {"logits": f"*{storage}", "bias": "*fp32", "recorded": "*i64", "weights": "*fp32", "indices": "*i64"}
    backward = {"grads": "*fp32", "logits": f"*{storage}", "indices": "*i64", "out": f"*{storage}"}
    variant = f"{'sigmoid' if sigmoid else 'softmax'}_{experts}_{storage}"
    return (
        Compiled(_gate, forward | sizes | dict.fromkeys(chosen, "constexpr"), chosen, variant=variant),
        Compiled(_gate_backward, backward | sizes | dict.fromkeys(shared, "constexpr"), shared, variant=variant),
    )


def _count_entry(experts: int) -> Compiled:
    constants = {"TOP_K": 8, "BLOCK_E": _blocks(experts)[1], "PAIRS": _COUNT_PAIRS, "STEP": _COUNT_STEP}
    signature = {"indices": "*i64", "counted": "*u8", "counts": "*i32", "pairs": "i32", "experts": "i32"}
    return Compiled(_count, signature | dict.fromkeys(constants, "constexpr"), constants, variant=str(experts))


COMPILED = _compiled()
