"""linear_logprob against fp64 autograd over whole logits, and split over ranks against itself in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor

from archon_kernels.linear_logprob import linear_logprob


def inputs(rows: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(vocab, width, generator=generator).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator) + 0.5
    return hidden, weight, targets, temperature, torch.randn(2, rows, generator=generator)


def truth(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    log_p = torch.log_softmax(logits if temperature is None else logits / temperature.double()[:, None], -1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("with_temperature", [False, True])
@pytest.mark.parametrize("tile_elements", [1, 101 * 3, 1 << 22], ids=["row", "three_rows", "whole"])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 101), (7, 101), (13, 2), (5, 1)])
def test_values_and_gradients_equal_fp64(rows: int, vocab: int, tile_elements: int, with_temperature: bool) -> None:
    hidden, weight, targets, temperature, pull = inputs(rows, 16, vocab, torch.float32)
    scale = temperature if with_temperature else None
    h, w = leaves(hidden, weight)
    logprobs, entropy = linear_logprob(h, w, targets, temperature=scale, with_entropy=True, tile_elements=tile_elements)
    assert entropy is not None and logprobs.dtype == entropy.dtype == torch.float32
    h64, w64 = leaves(hidden, weight, dtype=torch.float64)
    expected_logprobs, expected_entropy = truth(h64, w64, targets, scale)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0)
    (pull[0] * logprobs + pull[1] * entropy).sum().backward()
    (pull[0] * expected_logprobs + pull[1] * expected_entropy).sum().backward()
    for ours, expected in ((h.grad, h64.grad), (w.grad, w64.grad)):
        assert (ours.double() - expected).norm() <= 1e-5 * max(float(expected.norm()), 1.0)


@pytest.mark.parametrize("which", ["logprobs", "entropy"])
def test_either_output_may_stand_alone_in_a_loss(which: str) -> None:
    hidden, weight, targets, temperature, _ = inputs(5, 8, 11, torch.float64)
    h, w = leaves(hidden, weight)
    outputs = linear_logprob(h, w, targets, temperature=temperature, with_entropy=True, tile_elements=30)
    h64, w64 = leaves(hidden, weight)
    index = 0 if which == "logprobs" else 1
    outputs[index].sum().backward()  # type: ignore[union-attr]
    truth(h64, w64, targets, temperature)[index].sum().backward()
    torch.testing.assert_close(h.grad, h64.grad)
    torch.testing.assert_close(w.grad, w64.grad)


def test_gradcheck_in_fp64() -> None:
    hidden, weight, targets, temperature, _ = inputs(3, 4, 5, torch.float64)
    h, w = leaves(hidden, weight)
    assert torch.autograd.gradcheck(
        lambda a, b: linear_logprob(
            a, b, targets, temperature=temperature.double(), with_entropy=True, tile_elements=10
        ),
        (h, w),
    )


def test_no_rows_give_empty_outputs_and_zero_gradients() -> None:
    hidden, weight, targets, temperature, _ = inputs(0, 8, 11, torch.float32)
    h, w = leaves(hidden, weight)
    logprobs, entropy = linear_logprob(h, w, targets, temperature=temperature, with_entropy=True)
    assert entropy is not None and logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert h.grad.shape == (0, 8) and torch.equal(w.grad, torch.zeros_like(weight))


def test_a_frozen_head_or_frozen_hidden_states_get_no_gradient() -> None:
    hidden, weight, targets, _, _ = inputs(6, 8, 11, torch.float32)
    for trained in (0, 1):
        tensors = [hidden.clone(), weight.clone()]
        tensors[trained].requires_grad_()
        linear_logprob(tensors[0], tensors[1], targets)[0].sum().backward()
        assert tensors[trained].grad is not None and tensors[1 - trained].grad is None


def test_large_scores_stay_finite() -> None:
    hidden, weight, targets, _, _ = inputs(4, 8, 11, torch.float32)
    h, w = leaves(hidden * 1e3, weight)
    logprobs, entropy = linear_logprob(h, w, targets, with_entropy=True)
    assert entropy is not None
    (logprobs + entropy).sum().backward()
    assert all(torch.isfinite(t).all() for t in (logprobs, entropy, h.grad, w.grad))


def test_bf16_stays_within_its_tolerance_and_sums_the_weight_gradient_wide() -> None:
    hidden, weight, targets, temperature, pull = inputs(512, 32, 61, torch.bfloat16)
    weight = weight * 0.2
    h, w = leaves(hidden, weight)
    logprobs, _ = linear_logprob(h, w, targets, temperature=temperature, tile_elements=61 * 2)
    assert logprobs.dtype == torch.float32 and w.grad is None
    (pull[0] * logprobs).sum().backward()
    h64, w64 = leaves(hidden, weight, dtype=torch.float64)
    expected, _ = truth(h64, w64, targets, temperature)
    (pull[0] * expected).sum().backward()
    assert h.grad.dtype == w.grad.dtype == torch.bfloat16
    for ours, right in ((h.grad, h64.grad), (w.grad, w64.grad)):
        assert (ours.double() - right).norm() <= 1e-2 * right.norm()


def test_memory_is_bounded_by_the_tile() -> None:
    """No operation inside may allocate as much as the logits of all rows."""
    rows, vocab = 256, 4096
    hidden, weight, targets, _, _ = inputs(rows, 8, vocab, torch.float32)
    h, w = leaves(hidden, weight)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        logprobs, entropy = linear_logprob(h, w, targets, with_entropy=True, tile_elements=16 * vocab)
        (logprobs + entropy).sum().backward()  # type: ignore[operator]
    assert largest <= 16 * vocab < rows * vocab


SPLITS = ((50, 51), (101, 0), (1, 60, 7, 33), (26, 25, 25, 25))  # rows of a vocabulary of 101 on each rank
KINDS = ("fp64", "fp32", "bf16", "no_rows", "large_scores", "frozen_head")


def split_inputs(kind: str) -> list[Tensor]:
    """hidden, weight, targets, temperature and the gradients of both results."""
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(kind, torch.float32)
    tensors = list(inputs(0 if kind == "no_rows" else 23, 16, 101, dtype))
    tensors[0] *= 1e3 if kind == "large_scores" else 0.5
    return tensors


def score(kind: str, start: int, stop: int, tile_elements: int, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Results and gradients with the rows ``start:stop`` of the vocabulary."""
    hidden, weight, targets, temperature, pull = split_inputs(kind)
    h, w = hidden.requires_grad_(), weight[start:stop].requires_grad_(kind != "frozen_head")
    logprobs, entropy = linear_logprob(
        h,
        w,
        targets,
        temperature=temperature,
        with_entropy=True,
        tile_elements=tile_elements,
        vocab_start=start,
        group=group,
    )
    assert entropy is not None
    (pull[0] * logprobs + pull[1] * entropy).sum().backward()
    results = {"logprobs": logprobs, "entropy": entropy, "hidden.grad": h.grad}
    return {name: x.detach() for name, x in results.items()} | ({} if w.grad is None else {"weight.grad": w.grad})


def score_splits() -> dict[tuple[tuple[int, ...], str], dict[str, Tensor]]:
    """Every case on its first ranks; the others only watch its group being made."""
    results = {}
    for split in SPLITS:
        group = dist.new_group(list(range(len(split))))
        rank = dist.get_rank()
        if rank < len(split):
            start = sum(split[:rank])
            for kind in KINDS:
                results[split, kind] = score(kind, start, start + split[rank], 51 * 5, group)
    return results


@pytest.fixture(scope="module")
def split_results() -> list[dict[tuple[tuple[int, ...], str], dict[str, Tensor]]]:
    return RankPool(4).run(score_splits, 4)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layout_parity_of_a_vocabulary_split_over_ranks(
    split_results: list[dict[tuple[tuple[int, ...], str], dict[str, Tensor]]], split: tuple[int, ...], kind: str
) -> None:
    ranks = [results[split, kind] for results in split_results[: len(split)]]
    right = score(kind, 0, 101, 101 * 23, None)
    for name in ("logprobs", "entropy"):
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks)
        torch.testing.assert_close(
            ranks[0][name], right[name], atol=1e-5 if kind != "large_scores" else 2e-3, rtol=1e-6
        )
    assert ("weight.grad" in right) == ("weight.grad" in ranks[0]) == (kind != "frozen_head")
    ours = {"hidden.grad": torch.stack([rank["hidden.grad"].double() for rank in ranks]).sum(0)}
    if kind != "frozen_head":
        ours["weight.grad"] = torch.cat([rank["weight.grad"] for rank in ranks]).double()
    for name, gradient in ours.items():
        tolerance = {"fp64": 1e-12, "bf16": 1e-2}.get(kind, 1e-5)
        assert (gradient - right[name].double()).norm() <= tolerance * right[name].double().norm()


def test_a_start_in_the_vocabulary_needs_a_group() -> None:
    hidden, weight, targets, _, _ = inputs(3, 8, 11, torch.float32)
    with pytest.raises(ValueError, match="vocab_start is 11 without a group"):
        linear_logprob(hidden, weight, targets, vocab_start=11)


@pytest.mark.parametrize(
    ("hidden", "weight", "targets", "temperature"),
    [
        (torch.zeros(3, 4), torch.zeros(5, 6), torch.zeros(3, dtype=torch.long), None),
        (torch.zeros(3, 4), torch.zeros(5, 4).bfloat16(), torch.zeros(3, dtype=torch.long), None),
        (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.long), None),
        (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.long), torch.ones(1)),
    ],
    ids=["width", "dtype", "targets", "temperature"],
)
def test_arguments_that_do_not_fit_are_refused(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None
) -> None:
    with pytest.raises(ValueError):
        linear_logprob(hidden, weight, targets, temperature=temperature)
