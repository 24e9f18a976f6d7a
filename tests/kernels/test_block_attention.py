"""Attention of blocks, merged by log-sum-exp, against dense softmax in fp64."""

from __future__ import annotations

import pytest
import torch
from cases import noted
from torch import Tensor

from archon_kernels import attention
from archon_kernels.attention import block_attention, block_attention_backward

SHAPES = [(1, 1, True), (1, 5, False), (7, 1, False), (13, 29, False), (64, 64, True), (300, 37, False)]
HEADS = [(4, 4), (4, 2), (3, 1)]


@pytest.fixture(params=["chosen", "dense"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for this device, and the plain one that devices without a kernel take."""
    if request.param == "dense":
        for name in ("_block_attention", "_block_attention_backward"):
            monkeypatch.setattr(attention, name, getattr(attention, name.replace("_block", "_dense_block")))


def inputs(queries: int, keys: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = (queries, heads[0]), (keys, heads[1]), (keys, heads[1]), (queries, heads[0])
    return [torch.randn(*shape, 8, generator=generator).to(dtype) for shape in shapes]


def truth(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->ihj", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1)[:, None], -torch.inf)
    return torch.einsum("ihj,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1)


def gradients(q: Tensor, k: Tensor, v: Tensor, pull: Tensor, causal: bool) -> tuple[Tensor, ...]:
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(truth(*leaves, causal)[0], leaves, pull.double())


def near(ours: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    # A single key has a softmax of 1, whose derivative is zero but for rounding.
    return bool((ours.double() - right).norm() <= tolerance * max(float(right.norm()), 1.0))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_one_block_equals_dense_softmax(heads: tuple[int, int], dtype: torch.dtype) -> None:
    for queries, keys, causal in SHAPES:
        with noted(queries=queries, keys=keys, causal=causal):
            check_one_block(queries, keys, causal, heads, dtype)


def check_one_block(queries: int, keys: int, causal: bool, heads: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v, pull = inputs(queries, keys, heads, dtype)
    out, lse = block_attention(q, k, v, causal)
    right_out, right_lse = truth(*(x.double() for x in (q, k, v)), causal)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:2], torch.promote_types(dtype, torch.float32))
    assert near(out, right_out, dtype) and near(lse, right_lse, dtype)
    ours = block_attention_backward(pull, q, k, v, out, lse, causal)
    for gradient, right, leaf in zip(ours, gradients(q, k, v, pull, causal), (q, k, v), strict=True):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, dtype)
        assert near(gradient, right, dtype)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_blocks_of_keys_merge_into_the_whole(heads: tuple[int, int]) -> None:
    q, k, v, pull = inputs(11, 30, heads, torch.float32)
    blocks = [slice(0, 1), slice(1, 12), slice(12, 30)]
    parts = [block_attention(q, k[keys], v[keys], causal=False) for keys in blocks]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    out = sum((part_lse - lse).exp()[..., None] * part for part, part_lse in parts)
    assert near(out, truth(*(x.double() for x in (q, k, v)), False)[0], torch.float32)
    back = [block_attention_backward(pull, q, k[keys], v[keys], out, lse, False) for keys in blocks]
    ours = sum(part[0] for part in back), torch.cat([part[1] for part in back]), torch.cat([part[2] for part in back])
    for gradient, right in zip(ours, gradients(q, k, v, pull, False), strict=True):
        assert near(gradient, right, torch.float32)


@pytest.mark.parametrize(("queries", "keys", "causal"), [(0, 3, False), (3, 0, False), (3, 4, True)])
def test_empty_and_crooked_blocks_are_refused(queries: int, keys: int, causal: bool) -> None:
    q, k, v, pull = inputs(queries, keys, (2, 1), torch.float32)
    kind = "causal" if causal else "full"
    with pytest.raises(ValueError, match=f"{kind} block of {queries} queries and {keys} keys"):
        block_attention(q, k, v, causal)
    with pytest.raises(ValueError, match=f"{kind} block of {queries} queries and {keys} keys"):
        block_attention_backward(pull, q, k, v, q, q.sum(-1), causal)
