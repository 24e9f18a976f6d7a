"""LM head to log-probability and entropy of chosen tokens, without ever storing the logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from archon_kernels.dispatch import choose
from archon_kernels.dtypes import autocast_operands, wide_dtype
from archon_kernels.logprob_tiles import (
    GRADIENT,
    PEAK,
    STATISTICS,
    TARGET,
    add_product,
    kept_numel,
    merge_top,
    place_in,
    scores_of,
    tiles,
    top_of_tile,
)

_TILE_ELEMENTS_CPU = 1 << 23
"""16 MiB in bf16: smaller tiles make thin matrix products, larger ones leave the cache."""
_TILE_ELEMENTS_ACCELERATOR = 1 << 27
"""256 MiB in bf16: it takes larger products to keep an accelerator busy."""
_KEPT_BYTES = 1 << 27
"""Logits that together take no more are kept for backward, which then repeats no product: a tenth of a small step."""


class Logprobs(NamedTuple):
    """What ``linear_logprob`` returns; None where it was not asked for. M rows, K most likely tokens, in nats.

    Attributes:
        logprobs: ``[M]`` of the targets.
        entropy: ``[M]``.
        top_logprobs: ``[M, K]``, largest first.
        top_ids: ``[M, K]`` int64, the tokens that have them; the lower id first where two are equally likely.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


def linear_logprob(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    temperature: Tensor | None = None,
    mask_M: Tensor | None = None,
    with_entropy: bool = False,
    top_k: int = 0,
    tile_elements: int | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Logprobs:
    """Log-probability of each row's target, entropy and most likely tokens, under the softmax of the scores.

    Scores are ``cap(hidden @ weight.T + bias) / temperature`` with ``cap(x) = softcap * tanh(x / softcap)``. They exist
    one tile of rows x vocabulary at a time, in forward and again in backward, for which forward keeps its last tile,
    or all of them where they take at most 128 MiB.
    The matrix products run, and a tile is stored, in the dtype of ``hidden``; softmax, log-sum-exp, entropy and their
    derivatives run in fp32. Gradients that are summed over tiles are summed in fp32 and rounded once. Inputs in fp64
    are computed in fp64. Under autocast the operands of the matrix products are cast. Nothing is summed by atomics, so
    equal inputs give equal bits.

    With ``group`` the vocabulary is split over its ranks: each holds consecutive rows of ``weight`` (as many as it
    likes) and passes the same ``hidden``, ``targets``, ``temperature`` and ``mask``. The results are those of the whole
    vocabulary, equal on every rank; a target outside the local rows is another rank's. Backward takes the same gradient
    on every rank and does not communicate: the gradient of ``hidden`` is this rank's PARTIAL sum, which the caller adds
    up over the group; those of ``weight`` and ``bias`` are of the local rows, complete.

    Args:
        hidden_MD: ``[M, D]`` fp32, bf16, fp16 or fp64; M may be 0.
        weight_VD: ``[V, D]``, same dtype; with ``group``, this rank's rows.
        targets_M: ``[M]`` int64 in [0, V), V being the whole vocabulary. Outside of it the result is NaN or, on the
            CPU, an error; with ``group`` nobody looks.
        bias_V: ``[V]`` finite, any float dtype; with ``group``, of this rank's rows.
        softcap: above 0, or None for scores without bound.
        temperature: ``[M]`` fp32 above 0, or None for 1. Gets no gradient.
        mask_M: ``[M]`` bool. Rows where it is False are left out before any product, whatever they hold: their results
            and gradients are 0. Finding the others synchronises an accelerator.
        with_entropy: also return the entropy.
        top_k: K, how many of the most likely tokens to return. With ``group`` and fewer than K tokens in all of it, the
            last have log-probability -inf and id -1.
        tile_elements: upper bound on rows x V held at a time; None for what suits the device.
        vocab_start: token id of the first row of ``weight``.
        group: ranks that together hold the vocabulary; None when ``weight`` is all of it.

    Returns:
        fp32 (or fp64), differentiable in ``hidden``, ``weight`` and ``bias``.

    Raises:
        ValueError: shapes, dtypes or values that do not fit together.
    """
    hidden_MD, weight_VD = autocast_operands(hidden_MD, weight_VD)
    rows, vocab = hidden_MD.shape[0], weight_VD.shape[0]
    if hidden_MD.dtype != weight_VD.dtype or hidden_MD.shape[1:] != weight_VD.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden_MD.shape)} {hidden_MD.dtype} does not fit weight {tuple(weight_VD.shape)} "
            f"{weight_VD.dtype}: the last dimension and the dtype must be equal"
        )
    if any(x is not None and x.shape != (rows,) for x in (targets_M, temperature, mask_M)):
        raise ValueError(f"targets, temperature and mask need one entry for each of the {rows} rows of hidden")
    if mask_M is not None and mask_M.dtype != torch.bool:
        raise ValueError(f"mask is {mask_M.dtype}: pass bool, True for the rows to compute")
    if bias_V is not None and bias_V.shape != (vocab,):
        raise ValueError(f"bias {tuple(bias_V.shape)} needs one entry for each of the {vocab} rows of weight")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}: it must be above 0; pass None for no cap")
    if group is None and vocab_start != 0:
        raise ValueError(f"vocab_start is {vocab_start} without a group: whoever holds the other rows must be in one")
    if top_k < 0 or (group is None and top_k > vocab):
        raise ValueError(f"top_k is {top_k}: choose from 0 to {vocab}, the size of the vocabulary")
    kept_elements = 0
    if tile_elements is None:
        tile_elements = _tile_elements(hidden_MD.device)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden_MD, weight_VD, bias_V)):
            kept_elements = _KEPT_BYTES // hidden_MD.element_size()
    if tile_elements < 1:
        raise ValueError(f"tile_elements is {tile_elements}: a tile holds at least 1")
    logprobs, entropy, top_logprobs, top_ids, _, _ = _linear_logprob(
        hidden_MD,
        weight_VD,
        targets_M,
        bias_V,
        temperature,
        mask_M,
        softcap or 0.0,
        with_entropy,
        top_k,
        tile_elements,
        kept_elements,
        vocab_start,
        None if group is None else group.group_name,
    )
    top = (top_logprobs, top_ids) if top_k else (None, None)
    return Logprobs(logprobs, entropy if with_entropy else None, *top)


def logit_bytes(rows: int, vocab: int, width: int, device: torch.device, *, backward: bool) -> int:
    """Bytes of logits, ``width`` a number, that ``linear_logprob`` holds at once at most.

    Args:
        backward: count what forward keeps for backward, and the gradient of a tile beside it.
    """
    tile = min(_tile_elements(device), rows * vocab)
    kept = kept_numel(rows, vocab, tile, _KEPT_BYTES // width) if backward else 0
    return width * (tile + kept)


def _tile_elements(device: torch.device) -> int:
    return _TILE_ELEMENTS_CPU if device.type == "cpu" else _TILE_ELEMENTS_ACCELERATOR


@torch.library.custom_op("archon::linear_logprob", mutates_args=())
def _linear_logprob(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    bias_V: Tensor | None,
    temperature: Tensor | None,
    mask_M: Tensor | None,
    softcap: float,
    with_entropy: bool,
    top_k: int,
    tile_elements: int,
    kept_elements: int,
    vocab_start: int,
    group_name: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logprobs, entropy, top log-probs, top ids, log-sum-exp, and the logits that are kept, flat.

    Nothing has as many dimensions as a mask leaves rows: all shapes follow from those of the inputs.
    """
    shape = targets_M.shape
    kept = None if mask_M is None else mask_M.nonzero().squeeze(1)
    hidden_MD, targets_M, temperature = (_take(x, kept) for x in (hidden_MD, targets_M, temperature))
    if group_name is None and hidden_MD.device.type == "cpu" and targets_M.numel():
        low, high = (int(x) for x in targets_M.aminmax())
        if low < 0 or high >= weight_VD.shape[0]:
            bad = low if low < 0 else high
            raise ValueError(f"target {bad} is not in [0, {weight_VD.shape[0]}): mask rows that have no target")
    wide = wide_dtype(hidden_MD)
    bias_V = None if bias_V is None else bias_V.to(wide).contiguous()
    temperature = None if temperature is None else temperature.to(wide).contiguous()
    statistics = choose(STATISTICS, hidden_MD.device)
    targets_M = targets_M - vocab_start
    running_M4 = hidden_MD.new_zeros(*targets_M.shape, 4, dtype=wide)
    running_M4[:, PEAK] = torch.finfo(wide).min
    if group_name is None:
        running_M4[:, TARGET] = torch.nan  # until its tile comes
    top_scores_MK = running_M4.new_full((targets_M.shape[0], top_k), -torch.inf)
    top_ids_MK = targets_M.new_full((targets_M.shape[0], top_k), -1)
    vocab = weight_VD.shape[0]
    logits = hidden_MD.new_empty(kept_numel(shape[0], vocab, tile_elements, kept_elements))
    stride = vocab if logits.numel() == shape[0] * vocab else None
    row_tiles, column_tiles = tiles(hidden_MD.shape[0], vocab, tile_elements)
    for rows in row_tiles:
        scale = None if temperature is None else temperature[rows]
        for columns in column_tiles:
            logits_MC = place_in(logits, rows, columns, stride)
            torch.mm(hidden_MD[rows], weight_VD[columns].t(), out=logits_MC)
            bias_C = None if bias_V is None else bias_V[columns]
            target = targets_M[rows] - columns.start
            statistics(logits_MC, bias_C, scale, softcap, target, with_entropy, running_M4[rows])
            if top_k:
                scores_MC = scores_of(logits_MC, bias_C, scale, softcap)
                found = top_of_tile(scores_MC, min(top_k, scores_MC.shape[1]), vocab_start + columns.start)
                scores = torch.cat([top_scores_MK[rows], found[0]], 1)
                best = merge_top(scores, torch.cat([top_ids_MK[rows], found[1]], 1))
                top_scores_MK[rows], top_ids_MK[rows] = (x[:, :top_k] for x in best)
    # What a mask or a smaller tile leaves of the logits is neither written nor read: such rows cost no memory either.
    if group_name is not None:
        group = _resolve_process_group(GroupName(group_name))
        _sum_over_shards(running_M4, group)
        top_scores_MK, top_ids_MK = _top_of_shards(top_scores_MK, top_ids_MK, group)
    peak, total, target, weighted = running_M4.unbind(1)
    log_total = total.log()
    logprobs, entropy = (target - peak) - log_total, log_total - weighted / total
    top_logprobs_MK = (top_scores_MK - peak[:, None]) - log_total[:, None]
    logprobs, entropy, top_logprobs_MK, top_ids_MK, logsumexp = (
        x if kept is None else _spread(x, kept, shape[0])
        for x in (logprobs, entropy, top_logprobs_MK, top_ids_MK, peak + log_total)
    )
    entropy = entropy if with_entropy else entropy.new_empty(0)
    return logprobs, entropy, top_logprobs_MK, top_ids_MK, logsumexp, logits


@_linear_logprob.register_fake
def _(
    hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, with_entropy, top_k, tile_elements, kept_elements, _, _ = others
    rows = targets_M.shape[0]
    logprobs = hidden_MD.new_empty(rows, dtype=wide_dtype(hidden_MD))
    return (
        logprobs,
        logprobs.new_empty(rows if with_entropy else 0),
        logprobs.new_empty(rows, top_k),
        targets_M.new_empty(rows, top_k),
        torch.empty_like(logprobs),
        hidden_MD.new_empty(kept_numel(rows, weight_VD.shape[0], tile_elements, kept_elements)),
    )


@torch.library.custom_op("archon::linear_logprob_backward", mutates_args=())
def _linear_logprob_backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_top: Tensor | None,
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    bias_V: Tensor | None,
    temperature: Tensor | None,
    mask_M: Tensor | None,
    entropy: Tensor,
    top_ids_MK: Tensor,
    logsumexp_M: Tensor,
    logits: Tensor,
    softcap: float,
    tile_elements: int,
    vocab_start: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias, each with no entries where ``needs`` says that nobody wants it."""
    shape = hidden_MD.shape
    kept = None if mask_M is None else mask_M.nonzero().squeeze(1)
    pull_M3, chosen_MN, pull_chosen_MN = _pulls(
        grad_logprobs, grad_entropy, grad_top, entropy, targets_M, top_ids_MK, logsumexp_M
    )
    hidden_MD, temperature, logsumexp_M, pull_M3, chosen_MN, pull_chosen_MN = (
        _take(x, kept) for x in (hidden_MD, temperature, logsumexp_M, pull_M3, chosen_MN, pull_chosen_MN)
    )
    wide = logsumexp_M.dtype
    bias_wide = None if bias_V is None else bias_V.to(wide).contiguous()
    temperature = None if temperature is None else temperature.to(wide).contiguous()
    gradient = choose(GRADIENT, hidden_MD.device)
    chosen_MN = chosen_MN - vocab_start
    vocab = weight_VD.shape[0]
    stride = vocab if logits.numel() == shape[0] * vocab else None
    row_tiles, column_tiles = tiles(hidden_MD.shape[0], vocab, tile_elements)
    # One buffer for all tiles: fresh memory would cost page faults.
    narrow, fresh = wide != hidden_MD.dtype, logits.new_empty(min(tile_elements, hidden_MD.shape[0] * vocab))
    grad_hidden = hidden_MD.new_zeros(hidden_MD.shape if needs[0] else 0, dtype=wide if len(column_tiles) > 1 else None)
    grad_weight = weight_VD.new_empty(weight_VD.shape if needs[1] else 0)
    grad_bias = weight_VD.new_zeros(weight_VD.shape[:1] if needs[2] else 0, dtype=wide)
    if not row_tiles:
        grad_weight.zero_()
    for columns in column_tiles if row_tiles else []:
        weight_CD, bias_C = weight_VD[columns], None if bias_wide is None else bias_wide[columns]
        # Summed over row tiles in fp32 and rounded once, without a second gradient of the whole weight.
        summed = narrow and len(row_tiles) > 1 and needs[1]
        grad_weight_CD = weight_CD.new_empty(weight_CD.shape, dtype=wide) if summed else grad_weight[columns]
        for rows in row_tiles:
            scale = None if temperature is None else temperature[rows]
            grad_MC = place_in(fresh, rows, columns)
            if stride is not None or (rows is row_tiles[-1] and columns is column_tiles[-1]):
                logits_MC = place_in(logits, rows, columns, stride)
            else:
                logits_MC = torch.mm(hidden_MD[rows], weight_CD.t(), out=grad_MC)
            chosen = chosen_MN[rows] - columns.start
            gradient(
                logits_MC,
                bias_C,
                scale,
                softcap,
                logsumexp_M[rows],
                pull_M3[rows],
                chosen,
                pull_chosen_MN[rows],
                grad_MC,
            )
            if needs[0]:
                add_product(grad_hidden[rows], grad_MC, weight_CD, first=columns.start == 0)
            if needs[1]:
                add_product(grad_weight_CD, grad_MC.t(), hidden_MD[rows], first=rows.start == 0)
            if needs[2]:
                grad_bias[columns] += grad_MC.sum(0, dtype=wide)
        if summed:
            grad_weight[columns] = grad_weight_CD
    grad_hidden = grad_hidden.to(hidden_MD.dtype)
    if kept is not None and needs[0]:
        grad_hidden = _spread(grad_hidden, kept, shape[0])
    return grad_hidden, grad_weight, grad_bias.to(weight_VD.dtype if bias_V is None else bias_V.dtype)


@_linear_logprob_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, _, hidden_MD, weight_VD, _, bias_V, *_, needs = arguments
    bias = weight_VD if bias_V is None else bias_V
    return (
        hidden_MD.new_empty(hidden_MD.shape if needs[0] else 0),
        weight_VD.new_empty(weight_VD.shape if needs[1] else 0),
        bias.new_empty(weight_VD.shape[:1] if needs[2] else 0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.softcap, ctx.with_entropy, _, ctx.tile_elements, _, ctx.vocab_start, _ = inputs
    _, entropy, _, top_ids_MK, logsumexp_M, logits = output
    ctx.save_for_backward(*tensors, entropy, top_ids_MK, logsumexp_M, logits)
    ctx.mark_non_differentiable(top_ids_MK, logsumexp_M, logits)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_logprobs, grad_entropy, grad_top, *_ = grads
    grads = (grad_logprobs, grad_entropy if ctx.with_entropy else None, grad_top)
    needs = [ctx.needs_input_grad[place] for place in (0, 1, 3)]
    found = _linear_logprob_backward(*grads, *ctx.saved_tensors, ctx.softcap, ctx.tile_elements, ctx.vocab_start, needs)
    hidden, weight, bias = (grad if need else None for grad, need in zip(found, needs, strict=True))
    return hidden, weight, None, bias, *[None] * 9


_linear_logprob.register_autograd(_grad, setup_context=_save)


def _pulls(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_top: Tensor | None,
    entropy: Tensor,
    targets_M: Tensor,
    top_ids_MK: Tensor,
    logsumexp_M: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """``pull``, ``chosen`` and ``pull_chosen`` of the gradient pass, from what backward is given."""
    pull_M3 = logsumexp_M.new_zeros(*logsumexp_M.shape, 3)
    ids, pulls = [targets_M[:, None]], [pull_M3[:, :1] if grad_logprobs is None else grad_logprobs[:, None]]
    if grad_top is not None:
        ids.append(top_ids_MK)
        pulls.append(grad_top)
    pull_chosen_MN = torch.cat(pulls, 1)
    pull_M3[:, 0] = pull_chosen_MN.sum(1)
    if grad_entropy is not None:
        pull_M3[:, 1], pull_M3[:, 2] = grad_entropy, entropy
    return pull_M3, torch.cat(ids, 1), pull_chosen_MN


def _take(x: Any, rows: Tensor | None) -> Any:
    return x if x is None or rows is None else x.index_select(0, rows)


def _spread(x: Tensor, rows: Tensor, total: int) -> Tensor:
    """The inverse of ``_take``: zeros where nothing was taken."""
    return x.new_zeros(total, *x.shape[1:]).index_copy_(0, rows, x)


def _sum_over_shards(running_M4: Tensor, group: dist.ProcessGroup) -> None:
    """Bring the statistics of a shard from its own peak to the peak of all shards, and add them up."""
    peak, total, _, weighted = running_M4.unbind(1)
    top = peak.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    below = (peak - top).clamp(min=torch.finfo(top.dtype).min)
    weighted.add_(total * below).mul_(below.exp())
    total.mul_(below.exp())
    dist.all_reduce(running_M4, group=group)
    peak.copy_(top)


def _top_of_shards(scores_MK: Tensor, ids_MK: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    if scores_MK.shape[1] == 0:
        return scores_MK, ids_MK
    gathered: list[list[Tensor]] = []
    for x in (scores_MK, ids_MK):
        gathered.append([torch.empty_like(x) for _ in range(group.size())])
        dist.all_gather(gathered[-1], x, group=group)
    scores, ids = merge_top(*(torch.cat(parts, 1) for parts in gathered))
    return scores[:, : scores_MK.shape[1]].contiguous(), ids[:, : ids_MK.shape[1]].contiguous()
