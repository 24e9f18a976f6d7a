"""Triton kernels of ``archon_kernels.permute``: a counting sort, and the copies and sums of rows around it.

The sort takes three passes: count each expert's pairs in every block of pairs; add the counts up over the blocks; place
each pair behind the smaller experts, the earlier blocks and the earlier pairs of its block. Nothing is atomic, so the
order is stable and the same each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from archon_kernels.permute import padded_rows
from archon_kernels.triton_ops import Compiled

_PAIRS = 128  # pairs that one program counts and places
_EXPERTS = 32  # experts that it looks at in one go
_SCAN = 1024  # blocks whose counts are added up in one go
_ELEMENTS = 4096  # of rows, that one program moves
_WIDTH = 1024  # of a row, that it moves in one go


@triton.jit
def _count_kernel(
    experts_ptr, counts_ptr, pairs, num_blocks, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Pairs of each expert in this program's block: ``counts [E, blocks]``."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    for first in range(0, EXPERTS, BLOCK_E):
        column = first + tl.arange(0, BLOCK_E)
        counts = tl.sum((expert[:, None] == column[None, :]).to(tl.int32), axis=0)
        tl.store(counts_ptr + column * num_blocks + block, counts, mask=column < EXPERTS)


@triton.jit
def _scan_kernel(counts_ptr, totals_ptr, num_blocks, BLOCK: tl.constexpr):
    """Turn one expert's counts into those of the blocks before each, and store their total."""
    expert = tl.program_id(0)
    total = 0
    for first in range(0, num_blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        place = counts_ptr + expert * num_blocks + block
        counts = tl.load(place, mask=block < num_blocks, other=0)
        tl.store(place, tl.cumsum(counts, axis=0) - counts + total, mask=block < num_blocks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit
def _place_kernel(
    experts_ptr,
    before_ptr,
    totals_ptr,
    source_ptr,
    position_ptr,
    counts_ptr,
    pairs,
    num_blocks,
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    other = tl.arange(0, BLOCK)
    pair = block * BLOCK + lane
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32)
    others = tl.load(experts_ptr + block * BLOCK + other, mask=block * BLOCK + other < pairs, other=EXPERTS).to(
        tl.int32
    )
    earlier = (expert[:, None] == others[None, :]) & (other[None, :] < lane[:, None])
    row = tl.sum(earlier.to(tl.int32), axis=1)
    row += tl.load(before_ptr + expert * num_blocks + block, mask=pair < pairs, other=0)
    for first in range(0, EXPERTS, BLOCK_E):
        column = first + tl.arange(0, BLOCK_E)
        totals = tl.load(totals_ptr + column, mask=column < EXPERTS, other=0)
        padded = (totals + TILE - 1) // TILE * TILE
        row += tl.sum(tl.where(column[None, :] < expert[:, None], padded[None, :], 0), axis=1)
        if block == 0:
            tl.store(counts_ptr + column, padded.to(tl.int64), mask=column < EXPERTS)
    tl.store(position_ptr + pair, row.to(tl.int64), mask=pair < pairs)
    tl.store(source_ptr + row, pair.to(tl.int64), mask=pair < pairs)


@triton.jit
def _permute_kernel(
    hidden_ptr, source_ptr, out_ptr, rows, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(source_ptr + row, mask=row < rows, other=-1)
    token = pair // TOP_K
    for first in range(0, WIDTH, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)
        inside = column[None, :] < WIDTH
        place = token[:, None] * WIDTH + column[None, :]
        value = tl.load(hidden_ptr + place, mask=(pair >= 0)[:, None] & inside, other=0)
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(out_ptr + place, value, mask=(row < rows)[:, None] & inside)


@triton.jit
def _sum_kernel(
    rows_ptr, weights_ptr, position_ptr, out_ptr, tokens, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each token's sum over its K rows, in the order of its choices, each times its weight where they are weighted."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    for first in range(0, WIDTH, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (column[None, :] < WIDTH)
        total = tl.zeros((BLOCK, BLOCK_D), WIDE)
        for k in range(TOP_K):
            pair = token.to(tl.int64) * TOP_K + k
            row = tl.load(position_ptr + pair, mask=inside, other=0)
            value = tl.load(rows_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0).to(WIDE)
            if WEIGHTED:
                value *= tl.load(weights_ptr + pair, mask=inside, other=0).to(WIDE)[:, None]
            total += value
        place = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _combine_backward_kernel(
    grad_ptr, rows_ptr, weights_ptr, source_ptr, grad_rows_ptr, grad_weights_ptr, rows, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """By sorted row: each pair has one, so its weight's gradient is one program's own."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(source_ptr + row, mask=row < rows, other=-1)
    real = pair >= 0
    weight = tl.load(weights_ptr + pair, mask=real, other=0).to(WIDE)
    token = pair // TOP_K
    dot = tl.zeros((BLOCK,), WIDE)
    for first in range(0, WIDTH, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)
        inside = column[None, :] < WIDTH
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        mask = real[:, None] & inside
        gradient = tl.load(grad_ptr + token[:, None] * WIDTH + column[None, :], mask=mask, other=0).to(WIDE)
        value = tl.load(rows_ptr + place, mask=mask, other=0).to(WIDE)
        dot += tl.sum(gradient * value, axis=1)
        gradient = (gradient * weight[:, None]).to(grad_rows_ptr.dtype.element_ty)
        tl.store(grad_rows_ptr + place, gradient, mask=(row < rows)[:, None] & inside)
    tl.store(grad_weights_ptr + pair, dot.to(grad_weights_ptr.dtype.element_ty), mask=real)


def sort_by_expert(indices_TK: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    experts = indices_TK.contiguous()
    pairs = experts.numel()
    shape = (padded_rows(pairs, num_experts, tile),)
    source = experts.new_empty(shape) if tile == 1 else experts.new_full(shape, -1)
    position = experts.new_empty(pairs)
    if pairs == 0:
        return source, position, experts.new_zeros(num_experts)
    counts = experts.new_empty(num_experts)
    blocks = triton.cdiv(pairs, _PAIRS)
    before = experts.new_empty((num_experts, blocks), dtype=torch.int32)
    totals = experts.new_empty(num_experts, dtype=torch.int32)
    sizes = {"EXPERTS": num_experts, "BLOCK": _PAIRS, "BLOCK_E": _EXPERTS}
    _count_kernel[(blocks,)](experts, before, pairs, blocks, **sizes)
    _scan_kernel[(num_experts,)](before, totals, blocks, BLOCK=_SCAN)
    _place_kernel[(blocks,)](experts, before, totals, source, position, counts, pairs, blocks, TILE=tile, **sizes)
    return source, position, counts


def permute(hidden_TD: Tensor, source: Tensor, top_k: int) -> Tensor:
    rows, width = source.shape[0], hidden_TD.shape[1]
    out = hidden_TD.new_empty(rows, width)
    if out.numel():
        blocks, sizes = _blocks(rows, width)
        _permute_kernel[blocks](hidden_TD.contiguous(), source, out, rows, TOP_K=top_k, **sizes)
    return out


def permute_backward(grad_ND: Tensor, position: Tensor, top_k: int) -> Tensor:
    return _sum(grad_ND, None, position, top_k)


def combine(rows_ND: Tensor, weights_TK: Tensor, position: Tensor) -> Tensor:
    return _sum(rows_ND, weights_TK.contiguous(), position, weights_TK.shape[1])


def _sum(rows_ND: Tensor, weights_TK: Tensor | None, position: Tensor, top_k: int) -> Tensor:
    tokens, width = position.shape[0] // top_k, rows_ND.shape[1]
    out = rows_ND.new_empty(tokens, width)
    if out.numel():
        blocks, sizes = _blocks(tokens, width)
        options = {"TOP_K": top_k, "WEIGHTED": weights_TK is not None, "WIDE": _wide(rows_ND), **sizes}
        weights = position if weights_TK is None else weights_TK  # a pointer that is not read
        _sum_kernel[blocks](rows_ND.contiguous(), weights, position, out, tokens, **options)
    return out


def combine_backward(
    grad_TD: Tensor, rows_ND: Tensor, weights_TK: Tensor, source: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    rows, width = rows_ND.shape
    grad_rows, grad_weights = rows_ND.new_empty(rows_ND.shape), weights_TK.new_empty(weights_TK.shape)
    if width == 0:
        grad_weights.zero_()
    elif rows:
        blocks, sizes = _blocks(rows, width)
        inputs = (grad_TD.contiguous(), rows_ND.contiguous(), weights_TK.contiguous(), source)
        options = {"TOP_K": weights_TK.shape[1], "WIDE": _wide(rows_ND), **sizes}
        _combine_backward_kernel[blocks](*inputs, grad_rows, grad_weights, rows, **options)
    return grad_rows, grad_weights


def _blocks(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid, and sizes by kernel argument: short rows are moved several at a time."""
    columns = min(_WIDTH, triton.next_power_of_2(width))
    block = _ELEMENTS // columns
    return (triton.cdiv(rows, block),), {"WIDTH": width, "BLOCK": block, "BLOCK_D": columns}


def _wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


_SORT_SIZES = {"EXPERTS": 128, "BLOCK": _PAIRS, "BLOCK_E": _EXPERTS}
_ROW_SIZES = {"WIDTH": 4096, "TOP_K": 8, "BLOCK": 4, "BLOCK_D": _WIDTH}


def _compiled_rows(dtype: str) -> tuple[Compiled, ...]:
    x = f"*{dtype}"
    row_types = dict.fromkeys(_ROW_SIZES, "constexpr")
    ends = {"WIDE": "constexpr", **row_types}
    wide = {"WIDE": tl.float32, **_ROW_SIZES}
    sums = {"rows_ptr": x, "weights_ptr": "*fp32", "position_ptr": "*i64", "out_ptr": x, "tokens": "i32"}
    sums = {**sums, "WEIGHTED": "constexpr", **ends}
    backward = {"grad_ptr": x, "rows_ptr": x, "weights_ptr": "*fp32", "source_ptr": "*i64", "grad_rows_ptr": x}
    backward = {**backward, "grad_weights_ptr": "*fp32", "rows": "i32", **ends}
    moved = {"hidden_ptr": x, "source_ptr": "*i64", "out_ptr": x, "rows": "i32", **row_types}
    return (
        Compiled(_permute_kernel, moved, _ROW_SIZES, variant=dtype),
        Compiled(_sum_kernel, sums, {"WEIGHTED": True, **wide}, variant=f"combine {dtype}"),
        Compiled(_sum_kernel, sums, {"WEIGHTED": False, **wide}, variant=f"permute_backward {dtype}"),
        Compiled(_combine_backward_kernel, backward, wide, variant=dtype),
    )


def _compiled_sort() -> tuple[Compiled, ...]:
    types = dict.fromkeys(_SORT_SIZES, "constexpr")
    count = {"experts_ptr": "*i64", "counts_ptr": "*i32", "pairs": "i32", "num_blocks": "i32", **types}
    scan = {"counts_ptr": "*i32", "totals_ptr": "*i32", "num_blocks": "i32", "BLOCK": "constexpr"}
    place = {"experts_ptr": "*i64", "before_ptr": "*i32", "totals_ptr": "*i32", "source_ptr": "*i64"}
    place |= {"position_ptr": "*i64", "counts_ptr": "*i64", "pairs": "i32", "num_blocks": "i32", "TILE": "constexpr"}
    return (
        Compiled(_count_kernel, count, _SORT_SIZES),
        Compiled(_scan_kernel, scan, {"BLOCK": _SCAN}),
        Compiled(_place_kernel, {**place, **types}, {"TILE": 128, **_SORT_SIZES}),
    )


COMPILED: tuple[Compiled, ...] = (*_compiled_sort(), *_compiled_rows("bf16"), *_compiled_rows("fp32"))
