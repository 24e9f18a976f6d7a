"""Top-k softmax gate of a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from archon_kernels.dispatch import choose


def topk_gate(
    logits_TE: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    selection_bias_E: Tensor | None = None,
    indices_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts by softmax over all of them, and weigh them (Switch Transformers, Qwen3-MoE report).

    Args:
        logits_TE: ``[T, E]`` router logits, any float dtype; the softmax runs in fp32.
        top_k: experts per token, K.
        renormalize: divide the chosen probabilities by their sum.
        selection_bias_E: ``[E]`` fp32 added to the probabilities for the choice only (arXiv 2408.15664).
        indices_TK: ``[T, K]`` int64 recorded choices to use instead of the best K; an entry of -1 takes the choice that
            would have been made in its place. The weights still come from the logits.

    Returns:
        ``weights [T, K]`` fp32 with gradient to the logits, and ``indices [T, K]`` int64.

    Raises:
        ValueError: recorded choices of another shape than ``[T, K]``.
    """
    if indices_TK is not None and indices_TK.shape != (logits_TE.shape[0], top_k):
        raise ValueError(
            f"recorded expert choices have shape {tuple(indices_TK.shape)}, "
            f"the router needs {(logits_TE.shape[0], top_k)}"
        )
    return choose({"reference": _topk_gate})(logits_TE, top_k, renormalize, selection_bias_E, indices_TK)


def _topk_gate(
    logits_TE: Tensor, top_k: int, renormalize: bool, selection_bias_E: Tensor | None, recorded_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
    scores_TE = probs_TE.detach() if selection_bias_E is None else probs_TE.detach() + selection_bias_E
    indices_TK = scores_TE.topk(top_k, dim=-1).indices
    if recorded_TK is not None:
        indices_TK = torch.where(recorded_TK < 0, indices_TK, recorded_TK)
    weights_TK = probs_TE.gather(-1, indices_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK, indices_TK
