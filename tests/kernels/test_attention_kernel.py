"""Packed attention against dense masked softmax in fp64, one document at a time."""

from __future__ import annotations

import pytest
import torch
from cases import threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from archon_kernels import extension
from archon_kernels.attention import Documents, packed_attention

IMPLEMENTATIONS = ("cpp", "reference")


def truth(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outputs, start = [v[:0]], 0
    for length in lengths:
        part = slice(start, start + length)
        scores = torch.einsum("ihd,jhd->hij", q[part], k[part]) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[part]))
        start += length
    return torch.cat(outputs)


def borders(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def padded_documents(lengths: list[int]) -> Documents:
    """As they are grouped for torch's attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHON_KERNELS", "reference")
        return Documents.from_cu_seqlens(borders(lengths))


def check(lengths: list[int], heads: int, kv_heads: int, width: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    shapes = [(total, heads, width), (total, kv_heads, width), (total, kv_heads, width)]
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    right = [tensor.detach().double().requires_grad_() for tensor in ours]
    out = packed_attention(*ours, Documents.from_cu_seqlens(borders(lengths)))
    expected = truth(*right, lengths)
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    pull = torch.randn(expected.shape, generator=generator)
    if not total:
        return
    out.backward(pull)
    expected.backward(pull.double())
    for tensor, reference in zip(ours, right, strict=True):
        assert (tensor.grad.double() - reference.grad).norm() <= 1e-5 * max(float(reference.grad.norm()), 1e-3)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[], [1], [0, 3, 0], [1, 2, 37, 5, 64], [5, 5, 5], [300, 2, 257, 300], [13, 8, 9, 14, 11, 10] * 4, [0, 1, 2, 3]],
    ids=str,
)
def test_equals_dense_softmax(
    lengths: list[int], heads: tuple[int, int], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", kernels)
    check(lengths, *heads, width=8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.sampled_from([(2, 1), (2, 2), (6, 3)]))
def test_equals_dense_softmax_for_any_lengths(lengths: list[int], heads: tuple[int, int]) -> None:
    check(lengths, *heads, width=4, seed=len(lengths))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=40))
def test_every_token_has_one_place_and_little_is_filler(lengths: list[int]) -> None:
    documents = padded_documents(lengths)
    assert documents.buckets is not None
    padded = sum(count * length for count, length in documents.buckets)
    total, nonempty = sum(lengths), sum(length > 0 for length in lengths)
    assert total <= padded <= total * 1.25 + 4 * nonempty
    if documents.position is None:
        assert padded == total
    else:
        assert torch.equal(documents.source[documents.position], torch.arange(total))


def test_documents_of_similar_length_share_a_call() -> None:
    lengths = torch.randint(8, 15, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    assert len(padded_documents(lengths).buckets or ()) in (1, 2)


@pytest.mark.parametrize("lengths", [[12] * 8, [300, 500, 256]], ids=["equal", "long"])
def test_equal_or_long_documents_are_not_copied(lengths: list[int]) -> None:
    documents = padded_documents(lengths)
    assert documents.buckets is not None and documents.source is None


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_junk_in_one_document_stays_in_it(poison: float, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", kernels)
    lengths = [5, 9, 7]
    tensors = [torch.randn(sum(lengths), 2, 4) for _ in range(3)]
    documents = Documents.from_cu_seqlens(borders(lengths))
    clean = packed_attention(*tensors, documents)
    for tensor in tensors:
        tensor[5:14] = poison
        tensor.requires_grad_()
    dirty = packed_attention(*tensors, documents)
    kept = torch.tensor([*range(5), *range(14, 21)])
    assert torch.equal(dirty[kept], clean[kept])
    dirty[kept].sum().backward()
    for tensor in tensors:
        assert torch.isfinite(tensor.grad[kept]).all()


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
def test_narrow_dtypes_have_their_accuracy(
    dtype: torch.dtype, tolerance: float, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the norm of the output and of each gradient."""
    monkeypatch.setenv("ARCHON_KERNELS", kernels)
    lengths = [3, 17, 140]
    ours = [torch.randn(160, heads, 8).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    right = [tensor.detach().double().requires_grad_() for tensor in ours]
    out = packed_attention(*ours, Documents.from_cu_seqlens(borders(lengths)))
    assert out.dtype == dtype
    expected = truth(*right, lengths)
    assert (out.double() - expected).norm() <= tolerance * expected.norm()
    pull = torch.randn(160, 4, 8)
    out.backward(pull.to(dtype))
    expected.backward(pull.double())
    for tensor, reference in zip(ours, right, strict=True):
        assert (tensor.grad.double() - reference.grad).norm() <= tolerance * reference.grad.norm()


@pytest.mark.parametrize("lengths", [[150], [70, 1, 33, 46]], ids=["shared_products", "dealt_tasks"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_share_the_work(count: int, lengths: list[int]) -> None:
    """In fp64, with values narrower than keys and heads that are not contiguous."""
    shapes = [(6, 4, 150), (6, 2, 150), (3, 2, 150)]
    ours = [torch.randn(shape, dtype=torch.float64).permute(2, 1, 0).requires_grad_() for shape in shapes]
    with threads(count):
        out = packed_attention(*ours, Documents.from_cu_seqlens(borders(lengths)))
        grads = torch.autograd.grad(out.sin().sum(), ours)
    expected = truth(*ours, lengths)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for ours_grad, theirs in zip(grads, torch.autograd.grad(expected.sin().sum(), ours), strict=True):
        torch.testing.assert_close(ours_grad, theirs, rtol=1e-10, atol=1e-11)


def test_the_op_is_registered_whole_and_compiles_without_a_break() -> None:
    assert extension.load(), extension.problem()
    tensors = [torch.randn(20, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    torch.library.opcheck(torch.ops.archon.packed_attention, (*tensors, borders([3, 17])))
    documents = Documents.from_cu_seqlens(borders([3, 17]))
    compiled = torch.compile(lambda *args: packed_attention(*args, documents), backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(packed_attention(*tensors, documents).sum(), tensors)
    for ours, theirs in zip(torch.autograd.grad(compiled(*tensors).sum(), tensors), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_op_names_what_does_not_fit() -> None:
    assert extension.load(), extension.problem()
    q, k = torch.randn(4, 4, 8), torch.randn(4, 3, 8)
    with pytest.raises(RuntimeError, match=r"queries \[4, 4, 8\] do not fit keys \[4, 3, 8\]"):
        torch.ops.archon.packed_attention(q, k, k, borders([4]))
    for cu_seqlens in ([0, 5], [1, 4], [0, 9, 4], [0, -3, 4], [0]):
        with pytest.raises(RuntimeError, match="cu_seqlens must rise from 0 to 4"):
            torch.ops.archon.packed_attention(q, q, q, torch.tensor(cu_seqlens))
    for out, lse in ((q[:3], q[..., 0]), (q, q[:3, :, 0])):
        with pytest.raises(RuntimeError, match=r"for queries \[4, 4, 8\]"):
            torch.ops.archon.packed_attention_backward(q, q, q, q, borders([4]), out, lse)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_autocast_computes_in_its_dtype(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", kernels)
    tensors = [torch.randn(20, heads, 8) for heads in (4, 2, 2)]
    tensors[2] = tensors[2].bfloat16()
    documents = Documents.from_cu_seqlens(borders([3, 17]))
    with torch.autocast("cpu", torch.bfloat16):
        out = packed_attention(*tensors, documents)
    assert torch.equal(out, packed_attention(*(x.bfloat16() for x in tensors), documents))
