"""Context parallelism against packed attention in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from archon.parallel.context import (
    ContextGroups,
    RingDocuments,
    context_attention,
    context_documents,
    stream_multiple,
    stream_order,
    ulysses_degree,
)
from archon_kernels.attention import Documents, packed_attention

RANKS = 4
WIDTH = 8
DOCUMENTS = {
    "ragged": (1, 2, 37, 5, 64, 0, 13, 6),  # 128 tokens
    "long": (3, 90, 35),
    "whole": (128,),
    "single_tokens": (1,) * 40,
    "borders_at_chunks": (16, 32, 48, 32),
}
CUTS = ((1, 2), (2, 1), (1, 4), (4, 1), (2, 2))  # ring x ulysses
HEADS = ((4, 4), (4, 1), (12, 6))  # 12 query heads over 4 ranks: a rank's 3 read key heads 0, 0, 1 or 1, 2, 2
CASES = [
    (cut, name, heads) for cut in CUTS for name in DOCUMENTS for heads in HEADS if name == "ragged" or heads[1] < 6
]


def borders(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def inputs(tokens: int, heads: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(tokens + heads[1])
    return [torch.randn(tokens, h, WIDTH, generator=generator).to(dtype) for h in (heads[0], *heads[1:] * 2, heads[0])]


def groups_of(cut: tuple[int, int]) -> ContextGroups:
    """This rank's groups; with fewer context ranks than ranks, several contexts do the same."""
    ring, ulysses = cut
    mesh = init_device_mesh("cpu", (RANKS // (ring * ulysses), ring, ulysses), mesh_dim_names=("d", "ring", "ulysses"))
    return ContextGroups(*(mesh.get_group(name) if mesh[name].size() > 1 else None for name in ("ring", "ulysses")))


def attend(groups: ContextGroups, lengths: tuple[int, ...], tensors: list[Tensor], recompute: bool) -> list[Tensor]:
    """Output and gradients of q, k and v of this rank's tokens."""
    tokens = sum(lengths)
    order = stream_order(tokens, groups.ring_size, groups.ulysses_size).view(groups.size, -1)[groups.rank]
    q, k, v, pull = (x[order] for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    documents = context_documents(borders(lengths), tokens, groups)
    if recompute:
        out = checkpoint(context_attention, *leaves, documents, groups, use_reentrant=False)
    else:
        out = context_attention(*leaves, documents, groups)
    out.backward(pull)
    return [out.detach(), *(x.grad for x in leaves)]


def all_cases() -> dict[Any, list[Tensor]]:
    groups = {cut: groups_of(cut) for cut in CUTS}
    results: dict[Any, list[Tensor]] = {}
    for cut, name, heads in CASES:
        lengths = DOCUMENTS[name]
        results[cut, name, heads] = attend(groups[cut], lengths, inputs(sum(lengths), heads), recompute=False)
    for cut in CUTS:
        results[cut, "recompute"] = attend(groups[cut], DOCUMENTS["long"], inputs(128, (4, 1)), recompute=True)
        tensors = inputs(128, (4, 1), torch.bfloat16)
        results[cut, "bf16"] = attend(groups[cut], DOCUMENTS["long"], tensors, recompute=False)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[Any, list[Tensor]]]:
    return RankPool(RANKS).run(all_cases, RANKS)


def gathered(results: list[dict[Any, list[Tensor]]], key: Any) -> list[Tensor]:
    """Output and gradients of the whole stream, in its own order."""
    ring, ulysses = key[0]
    columns = zip(*(result[key] for result in results[: ring * ulysses]), strict=True)
    whole = [torch.cat(parts) for parts in columns]
    back = stream_order(whole[0].shape[0], ring, ulysses).argsort()
    return [x[back] for x in whole]


def expected(lengths: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    q, k, v, pull = (x.float() for x in inputs(sum(lengths), heads, dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = packed_attention(*leaves, Documents.from_cu_seqlens(borders(lengths)))
    out.backward(pull)
    return [out.detach(), *(x.grad for x in leaves)]


def assert_near(ours: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for a, b in zip(ours, right, strict=True):
        assert (a.float() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"r{c[0][0]}u{c[0][1]}-{c[1]}-h{c[2][0]}g{c[2][1]}")
def test_layout_parity_of_outputs_and_gradients(results: list[dict[Any, list[Tensor]]], case: Any) -> None:
    _, name, heads = case
    assert_near(gathered(results, case), expected(DOCUMENTS[name], heads), 1e-5)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"r{cut[0]}u{cut[1]}")
def test_recomputed_attention_is_the_same(results: list[dict[Any, list[Tensor]]], cut: tuple[int, int]) -> None:
    for result in results:
        for a, b in zip(result[cut, "recompute"], result[cut, "long", (4, 1)], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"r{cut[0]}u{cut[1]}")
def test_bf16_keeps_its_dtype_and_tolerance(results: list[dict[Any, list[Tensor]]], cut: tuple[int, int]) -> None:
    ours = gathered(results, (cut, "bf16"))
    assert {x.dtype for x in ours} == {torch.bfloat16}
    assert_near(ours, expected(DOCUMENTS["long"], (4, 1), torch.bfloat16), 1e-2)


def test_copies_of_a_context_agree(results: list[dict[Any, list[Tensor]]]) -> None:
    """Two contexts of two ranks each got the same stream."""
    for key in ((2, 1), "ragged", (4, 4)), ((1, 2), "long", (4, 1)):
        for a, b in zip(results[0][key], results[2][key], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"r{cut[0]}u{cut[1]}")
def test_the_order_is_a_permutation_and_the_ring_a_zigzag(cut: tuple[int, int]) -> None:
    ring, ulysses = cut
    tokens = 3 * stream_multiple(ring, ulysses)
    order = stream_order(tokens, ring, ulysses)
    assert torch.equal(order.sort().values, torch.arange(tokens))
    if ring == 1:
        assert torch.equal(order, torch.arange(tokens))
        return
    chunk = tokens // (2 * ring)
    for rank, rows in enumerate(order.view(ring, 2, chunk)):
        assert rows[:, 0].tolist() == [rank * chunk, (2 * ring - 1 - rank) * chunk]
        assert (rows.diff(dim=1) == 1).all()


@pytest.mark.parametrize(
    ("ring", "ulysses", "multiple"), [(1, 1, 1), (1, 4, 4), (2, 1, 4), (4, 1, 8), (2, 2, 4), (2, 3, 12)]
)
def test_tokens_that_cannot_be_cut_are_refused(ring: int, ulysses: int, multiple: int) -> None:
    assert stream_multiple(ring, ulysses) == multiple
    if multiple > 1:
        with pytest.raises(ValueError, match=f"{multiple + 1} tokens .* multiple of {multiple}"):
            stream_order(multiple + 1, ring, ulysses)


@pytest.mark.parametrize(
    ("mode", "heads", "context", "degree"),
    [("ring", 8, 4, 1), ("ulysses", 8, 4, 4), ("ulysses", 2, 4, 2), ("ulysses", 6, 4, 2), ("ulysses", 3, 4, 1)],
)
def test_ulysses_takes_what_the_heads_allow(mode: Any, heads: int, context: int, degree: int) -> None:
    assert ulysses_degree(mode, heads, context) == degree


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8), ring=st.sampled_from([2, 3, 4]))
def test_segments_cover_every_visible_pair_once(lengths: list[int], ring: int) -> None:
    lengths.append(-sum(lengths) % (2 * ring) + 2 * ring)
    tokens = sum(lengths)
    owned = stream_order(tokens, ring, 1).view(ring, -1)
    seen = torch.zeros(tokens, tokens, dtype=torch.long)
    plans = [RingDocuments.build(borders(tuple(lengths)), tokens, ring, rank) for rank in range(ring)]
    for rank, plan in enumerate(plans):
        assert [distance for distance, _ in plan.steps] == [distance for distance, _ in plans[0].steps]
        for distance, segments in plan.steps:
            for queries, keys, causal in segments:
                i, j = owned[rank][queries, None], owned[rank - distance][None, keys]
                seen[i, j] += (j <= i) if causal else 1
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    assert torch.equal(seen, (document[:, None] == document[None]).long().tril())


def test_documents_inside_chunks_need_no_communication() -> None:
    for lengths, distances in (((8,) * 8, [0]), ((8, 16, *[8] * 5), [0, 1]), ((64,), [0, 1, 2, 3])):
        plan = RingDocuments.build(borders(lengths), 64, ring_size=4, ring_rank=0)
        assert [distance for distance, _ in plan.steps] == distances


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, _ = inputs(8, (4, 2))
    with pytest.raises(ValueError, match="documents of 7 tokens in a stream of 8"):
        RingDocuments.build(borders((7,)), 8, 2, 0)
    with pytest.raises(ValueError, match="multiple of 4"):
        RingDocuments.build(borders((6,)), 6, 2, 0)
    with pytest.raises(ValueError, match="ring of 1 got RingDocuments"):
        context_attention(q, k, v, RingDocuments.build(borders((8,)), 8, 2, 0), ContextGroups())
