"""Sampling of one token per row, with one random number per row and log-probs of the full distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal.inference.backend import GenerationRequest

_LARGEST_UNIFORM = 1.0 - 2.0**-24


def sample(logits: Tensor, requests: Sequence[GenerationRequest], uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: ``[N, V]`` fp32.
        requests: N requests; temperature 0 takes the most probable token.
        uniforms: N numbers in [0, 1); they alone decide the draw, so a row does not depend on the others.

    Returns:
        tokens ``[N]`` int64, and their log-probs ``[N]`` fp32 at the sampling temperature (at temperature 1 where it
        is 0), before top-k and top-p.
    """
    temperatures = [request.temperature for request in requests]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor([temperature or 1.0 for temperature in temperatures])[:, None]
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    cut = [row for row, request in enumerate(requests) if request.top_k > 0 or request.top_p < 1.0]
    if cut:
        index = torch.tensor(cut)
        probs[index] = _truncate(probs[index], [requests[row] for row in cut])
    cumulative = probs.cumsum(-1)
    points = torch.tensor(uniforms, dtype=torch.float64).clamp_(max=_LARGEST_UNIFORM).float()[:, None]
    tokens = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)[:, 0]
    greedy = [row for row, temperature in enumerate(temperatures) if temperature == 0.0]
    if greedy:
        index = torch.tensor(greedy)
        tokens[index] = logits[index].argmax(-1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _truncate(probs: Tensor, requests: Sequence[GenerationRequest]) -> Tensor:
    """Zero what top-k, then top-p leaves out; rows are not renormalised. The most probable token always stays."""
    vocab = probs.shape[-1]
    top_k = torch.tensor([request.top_k or vocab for request in requests])[:, None]
    top_p = torch.tensor([request.top_p for request in requests], dtype=torch.float32)[:, None]
    ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(vocab) >= top_k, 0.0)
    mass_before = ordered.cumsum(-1) - ordered
    total = ordered.sum(-1, keepdim=True)
    ordered = ordered.masked_fill((mass_before >= top_p * total) & (top_p < 1.0), 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ordered)
