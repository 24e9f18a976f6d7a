"""Causal attention over sequences of uneven length for transformers models, packed or behind a paged cache.

transformers' own ``sdpa`` path of continuous batching scores every query of a step against every key of a step and
masks what belongs to other sequences: 512 sequences of 20 tokens cost 512 times the work. Here sequences of like size
are padded to each other and only attend to themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION = "archon_paged"
"""Name under which the function is registered with transformers (``attn_implementation``)."""

_VARIANTS = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class Bucket:
    """Sequences padded to the longest of them: ``n`` sequences, ``Q`` queries, ``K`` keys.

    ``queries [n * Q]`` and ``keys [n * K]`` index the packed queries and keys, padding repeats a valid index;
    ``mask [n, 1, Q, K]`` is True where a query sees a key; ``valid [n * Q]`` is None when no query is padding.
    """

    n: int
    queries: Tensor
    keys: Tensor
    mask: Tensor
    valid: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """How one forward cuts its packed sequences; the same for all layers."""

    buckets: tuple[Bucket, ...]
    n_queries: int
    keys: Tensor
    """All buckets' ``keys``, in order: what to gather."""
    keys_gathered: bool = False
    """The cache returns the keys already in the order of ``keys``."""


def _size_class(query: int, key: int) -> tuple[int, int]:
    """Lengths of one class differ by at most a factor of two, keys up to 32 are all alike."""
    return (query - 1).bit_length(), (max(key, 32) - 1).bit_length()


def plan_attention(query_lengths: Sequence[int], key_lengths: Sequence[int]) -> AttentionPlan:
    """Cut packed sequences into buckets; the queries of a sequence are its last tokens.

    Args:
        query_lengths, key_lengths: per sequence, in packed order; ``1 <= query_lengths[i] <= key_lengths[i]``.
    """
    q_len, k_len = torch.tensor(query_lengths), torch.tensor(key_lengths)
    q_start, k_start = q_len.cumsum(0) - q_len, k_len.cumsum(0) - k_len
    classes: dict[tuple[int, int], list[int]] = {}
    for row, size in enumerate(zip(query_lengths, key_lengths, strict=True)):
        classes.setdefault(_size_class(*size), []).append(row)
    buckets = []
    for rows in classes.values():
        index = torch.tensor(rows)
        q, k = q_len[index, None], k_len[index, None]
        q_range, k_range = torch.arange(int(q.max())), torch.arange(int(k.max()))
        seen = k_range <= (k - q + q_range)[..., None]
        is_query = q_range < q
        buckets.append(
            Bucket(
                n=len(rows),
                queries=(q_start[index, None] + torch.minimum(q_range, q - 1)).flatten(),
                keys=(k_start[index, None] + torch.minimum(k_range, k - 1)).flatten(),
                mask=(seen & (k_range < k)[:, None, :])[:, None],
                valid=None if bool(is_query.all()) else is_query.flatten(),
            )
        )
    keys = buckets[0].keys if len(buckets) == 1 else torch.cat([bucket.keys for bucket in buckets])
    return AttentionPlan(tuple(buckets), int(q_len.sum()), keys)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    attention_plan: AttentionPlan,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: ``query [1, H, T, D]``, ``key, value [1, H_kv, T, D]`` → ``[1, T, H, D]``.

    Raises:
        ValueError: the model asks for a variant of attention that is not computed here.
    """
    variants = [name for name in _VARIANTS if kwargs.get(name) is not None]
    if variants or dropout:
        raise ValueError(f"{type(module).__name__} asks for {variants or 'dropout'}, which paged_attention has not")
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    # [rows, H_kv, D], row-contiguous
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if not attention_plan.keys_gathered:
        keys, values = keys[attention_plan.keys], values[attention_plan.keys]
    queries = query[0].transpose(0, 1)
    output = queries.new_empty(attention_plan.n_queries, queries.shape[1], values.shape[2])
    start = 0
    for bucket in attention_plan.buckets:
        end = start + bucket.keys.numel()
        attended = _attend(queries[bucket.queries], keys[start:end], values[start:end], bucket, scaling)
        if bucket.valid is None:
            output[bucket.queries] = attended
        else:
            output[bucket.queries[bucket.valid]] = attended[bucket.valid]
        start = end
    return output[None], None


def _attend(queries: Tensor, keys: Tensor, values: Tensor, bucket: Bucket, scaling: float | None) -> Tensor:
    """``queries [n * Q, H, D]`` over ``keys``, ``values [n * K, H_kv, D]`` → ``[n * Q, H, D]``."""
    q, k, v = (x.unflatten(0, (bucket.n, -1)).transpose(1, 2) for x in (queries, keys, values))
    attended = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bucket.mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return attended.transpose(1, 2).flatten(0, 1)


def register() -> str:
    """Make the function known to transformers; returns the name to pass as ``attn_implementation``."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, paged_attention)
    return ATTENTION
