"""The LM head one tile at a time: how its logits are tiled, and the passes over a tile of them."""

from __future__ import annotations

import torch
from torch import Tensor

from archon_kernels.dispatch import implementations
from archon_kernels.dtypes import wide_dtype

TILE_ROWS = 8192
"""Rows of a tile at most. Tall tiles read the weight seldom, and need no sum of its gradient over tiles."""
PEAK, TOTAL, TARGET, WEIGHTED = range(4)
"""Columns of the running statistics of a row: largest score, sum of exp(score - largest), score of the target, and sum
of exp(score - largest) x (score - largest)."""


def kept_numel(rows: int, vocab: int, tile_elements: int, kept_elements: int) -> int:
    """Logits that forward keeps for backward: all of them if ``kept_elements`` allows, else one tile."""
    return rows * vocab if rows * vocab <= kept_elements else min(tile_elements, rows * vocab)


def place_in(buffer: Tensor, rows: slice, columns: slice, vocab: int | None = None) -> Tensor:
    """A place ``[rows, columns]`` for a tile: at the front of ``buffer``, or behind the tiles of a ``vocab`` before."""
    height, width = rows.stop - rows.start, columns.stop - columns.start
    start = 0 if vocab is None else rows.start * vocab + height * columns.start
    return buffer[start : start + height * width].view(height, width)


def tiles(rows: int, vocab: int, tile_elements: int) -> tuple[list[slice], list[slice]]:
    """Rows and columns of the tiles, as few as ``tile_elements`` allows and tall rather than wide."""
    tall = min(rows, TILE_ROWS, tile_elements)
    return _slices(rows, tall), _slices(vocab, tile_elements // max(1, tall))


def _slices(length: int, limit: int) -> list[slice]:
    """Split evenly into the fewest slices of at most ``limit``, their borders at multiples of 64 where that fits."""
    if length == 0:
        return []
    even = -(-length // -(-length // limit))
    step = min(limit, -(-even // 64) * 64)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """``total += left @ right``, the first time without reading ``total``, which may be wider than the product."""
    if total.dtype != left.dtype:
        narrow = left @ right
        total.copy_(narrow) if first else total.add_(narrow)
    elif first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


def _reference_statistics(
    logits_MC: Tensor,
    bias_C: Tensor | None,
    temperature: Tensor | None,
    softcap: float,
    target_M: Tensor,
    with_entropy: bool,
    running_M4: Tensor,
) -> None:
    """Bring the running statistics of some rows up to date with one more tile of logits.

    Args:
        logits_MC: ``[M, C]`` products of the head without its bias.
        bias_C, temperature, softcap: what makes scores of them; softcap 0 is none.
        target_M: ``[M]`` int64 column of the target, outside of [0, C) where the tile does not have it.
        running_M4: ``[M, 4]`` fp32, or fp64 for logits in fp64; written in place.
    """
    scores_MC = scores_of(logits_MC, bias_C, temperature, softcap)
    old, total, target, weighted = running_M4.unbind(1)
    peak = torch.maximum(old, scores_MC.amax(1))
    here = (target_M >= 0) & (target_M < scores_MC.shape[1])
    found = scores_MC.gather(1, (target_M * here)[:, None]).squeeze(1)
    p_MC = scores_MC.sub_(peak[:, None]).exp()
    below = (old - peak).clamp(min=torch.finfo(peak.dtype).min)
    shrink = below.exp()
    if with_entropy:
        weighted.copy_((weighted + total * below) * shrink + scores_MC.mul_(p_MC).sum(1))
    total.copy_(total * shrink + p_MC.sum(1))
    target.copy_(torch.where(here, found, target))
    old.copy_(peak)


def _reference_gradient(
    logits_MC: Tensor,
    bias_C: Tensor | None,
    temperature: Tensor | None,
    softcap: float,
    logsumexp_M: Tensor,
    pull_M3: Tensor,
    chosen_MN: Tensor,
    pull_chosen_MN: Tensor,
    out_MC: Tensor,
) -> None:
    """Gradient of a tile of logits.

    With d logprob = onehot - p and d entropy = -p (log p + entropy), each of a score:
    ``sum of pull_chosen at chosen - p (pull[0] + pull[1] (log p + pull[2]))``, then through temperature and cap.

    Args:
        logits_MC, bias_C, temperature, softcap: as for the statistics.
        logsumexp_M: ``[M]`` of the scores over the whole vocabulary.
        pull_M3: ``[M, 3]`` sum of the gradients of log-probabilities, gradient of the entropy, entropy.
        chosen_MN: ``[M, N]`` int64 columns of the log-probabilities, outside of [0, C) where the tile lacks them.
        pull_chosen_MN: ``[M, N]`` their gradients.
        out_MC: ``[M, C]`` in the dtype of the logits, which it may overwrite.
    """
    logp_MC = scores_of(logits_MC, bias_C, temperature, softcap)
    slope_MC = None
    if softcap:
        tanh_MC = logp_MC / softcap if temperature is None else logp_MC * (temperature / softcap)[:, None]
        slope_MC = tanh_MC.square_().neg_().add_(1)
    logp_MC.sub_(logsumexp_M[:, None])
    p_MC = logp_MC.exp()
    pull, pull_entropy, entropy = (column[:, None] for column in pull_M3.unbind(1))
    grad_MC = logp_MC.add_(entropy).mul_(pull_entropy).add_(pull).mul_(p_MC).neg_()
    here = (chosen_MN >= 0) & (chosen_MN < grad_MC.shape[1])
    grad_MC.scatter_add_(1, chosen_MN * here, pull_chosen_MN * here)
    if temperature is not None:
        grad_MC.div_(temperature[:, None])
    out_MC.copy_(grad_MC if slope_MC is None else grad_MC.mul_(slope_MC))


def scores_of(logits_MC: Tensor, bias_C: Tensor | None, temperature: Tensor | None, softcap: float) -> Tensor:
    """The scores of a tile of logits, a new tensor in fp32 or fp64."""
    scores_MC = logits_MC.to(wide_dtype(logits_MC), copy=True)
    if bias_C is not None:
        scores_MC.add_(bias_C)
    if softcap:
        scores_MC.div_(softcap).tanh_().mul_(softcap)
    return scores_MC if temperature is None else scores_MC.div_(temperature[:, None])


STATISTICS = implementations(_reference_statistics, cpp="logprob_statistics", triton="linear_logprob.statistics")
GRADIENT = implementations(_reference_gradient, cpp="logprob_gradient", triton="linear_logprob.gradient")


def top_of_tile(scores_MC: Tensor, top_k: int, start: int) -> tuple[Tensor, Tensor]:
    """The largest scores of a tile and their ids, largest first; of equal ones the lower id, unlike ``topk``."""
    columns = scores_MC.shape[1]
    least = scores_MC.topk(top_k, sorted=True).values[:, -1:]
    rank = torch.arange(columns, 0, -1, dtype=torch.int32, device=scores_MC.device)
    rank_MC = (scores_MC >= least) * rank
    rank_MC += (scores_MC > least) * columns
    index = rank_MC.topk(top_k).indices
    return merge_top(scores_MC.gather(1, index), index + start)


def merge_top(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort candidates by score, equal ones by id."""
    ids, order = ids.sort(1)
    scores, by_score = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    return scores, ids.gather(1, by_score)
