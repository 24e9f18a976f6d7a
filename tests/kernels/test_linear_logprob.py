"""linear_logprob against fp64 autograd over whole logits, and split over ranks against itself in one process.

Tolerances against fp64 on the same inputs: log-probs and entropy absolute, 1e-5 in fp32, 3e-2 in bf16 and 4e-3 in fp16,
where the logits are rounded; gradients 1e-5, 1e-2 and 2e-3 of their norm, but see logprob_cases for the largest
vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import IMPLEMENTATIONS, noted, use
from logprob_cases import LARGE, MASKS, problem, whole_logprobs
from moe_cases import TOKENS
from rank_pool import RankPool
from torch import Tensor

import archon_kernels.linear_logprob as linear_logprob_module
from archon_kernels import logprob_tiles
from archon_kernels.linear_logprob import linear_logprob

DTYPES = (torch.float32, torch.bfloat16)


def inputs(rows: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(vocab, width, generator=generator).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator) + 0.5
    return hidden, weight, targets, temperature, torch.randn(2, rows, generator=generator)


def truth(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    log_p = whole_logprobs(hidden, weight, temperature=temperature)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use(request.param, monkeypatch)


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize(("rows", "vocab"), [(1, 101), (7, 101), (13, 2), (5, 1)])
def test_values_and_gradients_of_any_tiling_equal_fp64(rows: int, vocab: int, implementation: None) -> None:
    for tile_elements, with_temperature in itertools.product((1, 101 * 3, 1 << 22), (False, True)):
        with noted(tile_elements=tile_elements, with_temperature=with_temperature):
            check_tiling(rows, vocab, tile_elements, with_temperature)


def check_tiling(rows: int, vocab: int, tile_elements: int, with_temperature: bool) -> None:
    hidden, weight, targets, temperature, pull = inputs(rows, 16, vocab, torch.float32)
    scale = temperature if with_temperature else None
    h, w = leaves(hidden, weight)
    logprobs, entropy, *_ = linear_logprob(
        h, w, targets, temperature=scale, with_entropy=True, tile_elements=tile_elements
    )
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
        )[:2],
        (h, w),
    )


def test_no_rows_give_empty_outputs_and_zero_gradients() -> None:
    hidden, weight, targets, temperature, _ = inputs(0, 8, 11, torch.float32)
    h, w = leaves(hidden, weight)
    logprobs, entropy, *_ = linear_logprob(h, w, targets, temperature=temperature, with_entropy=True)
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
    logprobs, entropy, *_ = linear_logprob(h, w, targets, with_entropy=True)
    assert entropy is not None
    (logprobs + entropy).sum().backward()
    assert all(torch.isfinite(t).all() for t in (logprobs, entropy, h.grad, w.grad))


def test_bf16_stays_within_its_tolerance_and_sums_the_weight_gradient_wide() -> None:
    hidden, weight, targets, temperature, pull = inputs(512, 32, 61, torch.bfloat16)
    weight = weight * 0.2
    h, w = leaves(hidden, weight)
    logprobs, *_ = linear_logprob(h, w, targets, temperature=temperature, tile_elements=61 * 2)
    assert logprobs.dtype == torch.float32 and w.grad is None
    (pull[0] * logprobs).sum().backward()
    h64, w64 = leaves(hidden, weight, dtype=torch.float64)
    expected, _ = truth(h64, w64, targets, temperature)
    (pull[0] * expected).sum().backward()
    assert h.grad.dtype == w.grad.dtype == torch.bfloat16
    for ours, right in ((h.grad, h64.grad), (w.grad, w64.grad)):
        assert (ours.double() - right).norm() <= 1e-2 * right.norm()


def test_memory_is_bounded_by_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation inside may allocate as much as the logits of all rows."""
    monkeypatch.setenv("ARCHON_KERNELS", "reference")
    rows, vocab, tile = 256, 4096, 16 * 4096
    hidden, weight, targets, _, pull = inputs(rows, 8, vocab, torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():  # inside the operators: from outside, each is one operation
        forward = linear_logprob_module._linear_logprob._init_fn
        _, entropy, _, top_ids, logsumexp, kept = forward(
            hidden, weight, targets, None, None, None, 0.0, True, 0, tile, 0, 0, None
        )
        saved = (hidden, weight, targets, None, None, None, entropy, top_ids, logsumexp, kept)
        backward = linear_logprob_module._linear_logprob_backward._init_fn
        backward(pull[0], pull[1], None, *saved, 0.0, tile, 0, [True, True, False])
    assert rows * 8 < largest <= tile < rows * vocab


@pytest.mark.parametrize("masked", [False, True])
def test_few_logits_are_kept_and_not_computed_again(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits either way, with two products in backward for each tile instead of three."""
    monkeypatch.setattr(linear_logprob_module, "_TILE_ELEMENTS_CPU", 64)
    hidden, weight, targets, _, pull = inputs(20, 8, 11, torch.float32)
    mask = torch.arange(20) % 3 > 0 if masked else None
    found, products = {}, {}
    for kept in (0, 4 * 20 * 11 - 1, 4 * 20 * 11):
        monkeypatch.setattr(linear_logprob_module, "_KEPT_BYTES", kept)
        h, w = leaves(hidden, weight)
        out = linear_logprob(h, w, targets, mask_M=mask, with_entropy=True)
        with torch.profiler.profile() as profile:
            grads = torch.autograd.grad((out.logprobs * pull[0] + out.entropy * pull[1]).sum(), (h, w))
        products[kept] = sum(
            event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm_")
        )
        found[kept] = [out.logprobs, out.entropy, *grads]
    none, less, all_kept = found
    assert all(torch.equal(a, b) for kept in (less, all_kept) for a, b in zip(found[none], found[kept], strict=True))
    tiles = products[all_kept] // 2
    assert tiles > 2 and products[none] == products[less] == 3 * tiles - 1


def test_nothing_is_kept_without_a_backward_pass() -> None:
    hidden, weight, targets, _, _ = inputs(20, 8, 11, torch.float32)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.extend(args[10:11] if func is torch.ops.archon.linear_logprob.default else ())
            return func(*args, **(kwargs or {}))

    with Watch():
        linear_logprob(hidden, weight, targets)
        linear_logprob(hidden, weight.requires_grad_(), targets)
    assert seen == [0, linear_logprob_module._KEPT_BYTES // 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", MASKS)
def test_values_and_gradients_equal_fp64(masked: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, plain in itertools.product(TOKENS, (True, False)):
        given = problem(rows, 1009, dtype, masked, plain=plain)
        for implementation in IMPLEMENTATIONS:
            use(implementation, monkeypatch)
            with noted(rows=rows, plain=plain, implementation=implementation):
                given.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "masked", "share"),
    [(0, "none", 1), (1, "none", 1), (7, "ones", 1), (7, "random", 0.4), (129, "random", 0.1), (1000, "random", 0.01),
     (129, "zeros", 0), (1000, "zeros", 0),
     pytest.param(129, "ones", 1, marks=pytest.mark.slow), pytest.param(1000, "random", 0.1, marks=pytest.mark.slow),
     pytest.param(1000, "ones", 1, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_large_vocabulary_equals_fp64(
    rows: int, masked: str, share: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for plain in (True, False):
        given = problem(rows, LARGE, dtype, masked, share=share, plain=plain)
        for implementation in IMPLEMENTATIONS:
            use(implementation, monkeypatch)
            with noted(implementation=implementation, plain=plain):
                given.check()


def test_fp16_equals_fp64(implementation: None) -> None:
    for rows, plain in itertools.product((1, 7, 129), (True, False)):
        with noted(rows=rows, plain=plain):
            problem(rows, 1009, torch.float16, "random", plain=plain).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tall", "tile_elements"), [(50, 50 * 100), (50, 50 * 1009), (8192, 129 * 100), (1, 64)])
def test_several_tiles_each_way_equal_fp64(
    implementation: None, tall: int, tile_elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_tiles, "TILE_ROWS", tall)
    for masked in ("none", "random"):
        with noted(masked=masked):
            problem(129 if tall > 1 else 5, 1009, dtype, masked).check(tile_elements=tile_elements)


def test_gradcheck_of_every_option(implementation: None) -> None:
    hidden, weight, targets, temperature, _ = inputs(4, 4, 7, torch.float64)
    h, w, b = leaves(hidden, weight, torch.linspace(-1, 1, 7, dtype=torch.float64))
    mask = torch.tensor([True, False, True, True])

    def outputs(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        found = linear_logprob(
            h,
            w,
            targets,
            bias_V=b,
            softcap=2.0,
            temperature=temperature,
            mask_M=mask,
            with_entropy=True,
            top_k=2,
            tile_elements=9,
        )
        assert found.entropy is not None and found.top_logprobs is not None
        return found.logprobs, found.entropy, found.top_logprobs

    assert torch.autograd.gradcheck(outputs, (h, w, b))


def test_equally_likely_tokens_come_in_the_order_of_their_ids(implementation: None) -> None:
    weight = torch.zeros(40, 2)
    weight[[3, 30], 0] = 1.0  # two tokens above 38 equal ones
    targets = torch.zeros(2, dtype=torch.long)
    for tile_elements in (1 << 10, 14):
        found = linear_logprob(torch.ones(2, 2), weight, targets, top_k=5, tile_elements=tile_elements)
        assert found.entropy is None and found.top_ids is not None
        assert found.top_ids.tolist() == [[3, 30, 0, 1, 2]] * 2


def test_a_likely_token_keeps_its_small_gradient_in_bf16(implementation: None) -> None:
    """onehot - p cancels where p is close to 1: rounding p first would leave nothing of it."""
    weight = torch.zeros(3, 2, dtype=torch.bfloat16)
    weight[0, 0] = 1.0
    h = torch.tensor([[9.0, 0.0]]).bfloat16().requires_grad_()
    linear_logprob(h, weight, torch.tensor([0])).logprobs.sum().backward()
    p = torch.tensor([9.0, 0, 0], dtype=torch.float64).softmax(0)[0]
    torch.testing.assert_close(h.grad[0, 0].double(), 1 - p, rtol=1e-2, atol=0)


def test_backward_twice_gives_the_same_gradient(implementation: None) -> None:
    hidden, weight, targets, _, _ = inputs(7, 8, 11, torch.float32)
    h, w = leaves(hidden, weight)
    loss = linear_logprob(h, w, targets).logprobs.sum()
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, (h, w)), strict=True))


@pytest.mark.parametrize("kept", [0, 100], ids=["one_tile_kept", "all_kept"])
@pytest.mark.parametrize("with_options", [False, True])
def test_operator_registration(implementation: None, with_options: bool, kept: int) -> None:
    hidden, weight, targets, temperature, _ = inputs(5, 8, 11, torch.float32)
    h, w, b = leaves(hidden, weight, torch.zeros(11))
    mask = torch.ones(5, dtype=torch.bool)  # only what is kept of a whole mask and of a full tile is all written
    optional = (b, temperature, mask) if with_options else (None, None, None)
    arguments = (h, w, targets, *optional, 3.0 * with_options, with_options, 2 * with_options, 20, kept, 0, None)
    torch.library.opcheck(linear_logprob_module._linear_logprob, arguments)


def test_compiles_into_one_graph() -> None:
    hidden, weight, targets, temperature, pull = inputs(7, 8, 11, torch.float32)
    mask = torch.arange(7) % 3 > 0

    def loss(h: Tensor, w: Tensor) -> Tensor:
        found = linear_logprob(h, w, targets, temperature=temperature, mask_M=mask, with_entropy=True, top_k=2)
        assert found.entropy is not None and found.top_logprobs is not None
        return (found.logprobs * pull[0] + found.entropy * pull[1] + found.top_logprobs.sum(1)).sum()

    eager, compiled = leaves(hidden, weight), leaves(hidden, weight)
    loss(*eager).backward()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(*compiled).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(eager, compiled, strict=True))


def test_autocast_runs_the_products_in_its_dtype() -> None:
    hidden, weight, targets, _, _ = inputs(7, 8, 11, torch.float32)
    h, w = leaves(hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_logprob(h, w, targets).logprobs
    assert torch.equal(found, linear_logprob(hidden.bfloat16(), weight.bfloat16(), targets).logprobs)
    found.sum().backward()
    assert h.grad.dtype == w.grad.dtype == torch.float32


def test_masked_rows_are_left_out_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, _, _ = inputs(100, 8, 11, torch.float32)
    products: list[int] = []
    mm = torch.mm

    def watched(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        products.append(left.shape[0] * left.shape[1] * right.shape[1])
        return mm(left, right, **options)

    monkeypatch.setattr(torch, "mm", watched)
    h, w = leaves(hidden, weight)
    linear_logprob(h, w, targets, mask_M=torch.arange(100) < 30).logprobs.sum().backward()
    assert products == [30 * 8 * 11] * 3


def test_masked_rows_are_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for backward has room for them, whose pages stay untouched: nothing fills it."""
    monkeypatch.setattr(linear_logprob_module, "_TILE_ELEMENTS_CPU", 64)
    hidden, weight, targets, _, _ = inputs(100, 8, 11, torch.float32)
    filled: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in ("zero_", "fill_", "zeros", "new_zeros", "full", "new_full", "copy_"):
                filled.append(out.numel())
            return out

    mask = torch.arange(100) < 3
    with Watch():
        kept = linear_logprob_module._linear_logprob._init_fn(
            hidden, weight, targets, None, None, mask, 0.0, False, 0, 64, 100 * 11, 0, None
        )[-1]
    assert kept.numel() == 100 * 11 and filled and max(filled) <= 100
    torch.testing.assert_close(kept[: 3 * 11].sort().values, (hidden[:3] @ weight.t()).flatten().sort().values)


SPLITS = (
    (50, 51),
    (101, 0),
    (40, 40, 21),
    (1, 60, 7, 33),
    (26, 25, 25, 25),
)  # rows of a vocabulary of 101 on each rank
KINDS = ("fp64", "fp32", "bf16", "no_rows", "large_scores", "frozen_head")


def split_inputs(kind: str) -> list[Tensor]:
    """hidden, weight, targets, temperature and the gradients of both results."""
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(kind, torch.float32)
    tensors = list(inputs(0 if kind == "no_rows" else 23, 16, 101, dtype))
    tensors[0] *= 1e3 if kind == "large_scores" else 0.5
    return tensors


def score(
    kind: str, start: int, stop: int, tile_elements: int | None, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Results and gradients with the rows ``start:stop`` of the vocabulary."""
    hidden, weight, targets, temperature, pull = split_inputs(kind)
    h, w = hidden.requires_grad_(), weight[start:stop].requires_grad_(kind != "frozen_head")
    logprobs, entropy, top_logprobs, top_ids = linear_logprob(
        h,
        w,
        targets,
        temperature=temperature,
        with_entropy=True,
        top_k=4,
        tile_elements=tile_elements,
        vocab_start=start,
        group=group,
    )
    assert entropy is not None and top_logprobs is not None and top_ids is not None
    (pull[0] * logprobs + pull[1] * entropy + pull[0] * top_logprobs.sum(1)).sum().backward()
    results = {"logprobs": logprobs, "entropy": entropy, "top": top_logprobs, "ids": top_ids, "hidden.grad": h.grad}
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
                tile_elements = None if kind == "fp32" else 51 * 5  # with None the logits are kept
                results[split, kind] = score(kind, start, start + split[rank], tile_elements, group)
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
    assert torch.equal(ranks[0]["ids"], right["ids"])
    for name in ("logprobs", "entropy", "top"):
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks)
        torch.testing.assert_close(
            ranks[0][name], right[name], atol=1e-5 if kind != "large_scores" else 5e-3, rtol=1e-6
        )
    assert ("weight.grad" in right) == ("weight.grad" in ranks[0]) == (kind != "frozen_head")
    ours = {"hidden.grad": torch.stack([rank["hidden.grad"].double() for rank in ranks]).sum(0)}
    if kind != "frozen_head":
        ours["weight.grad"] = torch.cat([rank["weight.grad"] for rank in ranks]).double()
    for name, gradient in ours.items():
        # a score of 1e4 is rounded to 1e-3, and so is p
        tolerance = {"fp64": 1e-12, "bf16": 1e-2, "large_scores": 1e-3}.get(kind, 1e-5)
        assert (gradient - right[name].double()).norm() <= tolerance * right[name].double().norm()


def test_a_start_in_the_vocabulary_needs_a_group() -> None:
    hidden, weight, targets, _, _ = inputs(3, 8, 11, torch.float32)
    with pytest.raises(ValueError, match="vocab_start is 11 without a group"):
        linear_logprob(hidden, weight, targets, vocab_start=11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_VD": torch.zeros(5, 6)}, "last dimension and the dtype must be equal"),
        ({"weight_VD": torch.zeros(5, 4).bfloat16()}, "last dimension and the dtype must be equal"),
        ({"targets_M": torch.zeros(2, dtype=torch.long)}, "one entry for each of the 3 rows"),
        ({"targets_M": torch.tensor([0, 5, 0])}, r"target 5 is not in \[0, 5\)"),
        ({"targets_M": torch.tensor([0, -100, 0])}, r"target -100 is not in \[0, 5\)"),
        ({"temperature": torch.ones(1)}, "one entry for each of the 3 rows"),
        ({"mask_M": torch.ones(4, dtype=torch.bool)}, "one entry for each of the 3 rows"),
        ({"mask_M": torch.ones(3)}, "mask is torch.float32: pass bool"),
        ({"bias_V": torch.zeros(4)}, "bias .* one entry for each of the 5 rows of weight"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"top_k": 6}, "top_k is 6: choose from 0 to 5"),
        ({"tile_elements": 0}, "tile_elements is 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = {
        "hidden_MD": torch.zeros(3, 4),
        "weight_VD": torch.zeros(5, 4),
        "targets_M": torch.zeros(3, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=message):
        linear_logprob(**{**arguments, **options})


def test_strided_temperature_and_bias_are_read_by_their_strides() -> None:
    hidden, weight, targets, temperature, _ = inputs(7, 16, 101, torch.float32)
    bias = torch.randn(101, 2, generator=torch.Generator().manual_seed(3))[:, 0]
    for given in (torch.tensor([0.5]).expand(7), temperature.repeat_interleave(3)[::3]):
        found = linear_logprob(hidden, weight, targets, temperature=given, bias_V=bias).logprobs
        dense = linear_logprob(hidden, weight, targets, temperature=given.clone(), bias_V=bias.clone()).logprobs
        assert torch.equal(found, dense) and found.isfinite().all()
