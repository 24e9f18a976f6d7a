"""Triton kernels of ``archon_kernels.grouped_mm``.

Each program owns one tile of a result and finds its expert from the counts, on the device. The grid is what suffices
for any counts; programs beyond the last tile return at once. Rows that belong to no expert are one more group, whose
tiles are stored as zeros. Every sum has one owner and one order, so results are the same each time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from archon_kernels.dispatch import interpreting
from archon_kernels.triton_ops import Compiled

_GROUP = 8  # row tiles that go over a weight's columns together, so that both stay in the cache
_ELEMENTS = 4096  # that one program of the elementwise backward takes at most
_STAGES = 3


@triton.jit
def _find_tile(counts_ptr, tile, rows, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr):
    """Expert of a row tile, its first row and the end of the expert's rows: EXPERTS and more stand for no expert."""
    expert = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + expert, mask=expert < EXPERTS, other=0).to(tl.int32)
    counts = tl.where(expert == EXPERTS, rows - tl.sum(counts, axis=0), counts)
    tiles = (counts + BLOCK_R - 1) // BLOCK_R
    before = tl.cumsum(tiles, axis=0) <= tile
    found = tl.sum(before.to(tl.int32), axis=0)
    first = tl.sum(tl.where(before, counts, 0), axis=0)
    start = first + (tile - tl.sum(tl.where(before, tiles, 0), axis=0)) * BLOCK_R
    end = first + tl.sum(tl.where(expert == found, counts, 0), axis=0)
    return found, start, end


@triton.jit
def _swizzle(program, row_tiles, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """Row tile and column tile of a program: groups of row tiles go over all column tiles."""
    group = program // (GROUP * COLUMN_TILES)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    inside = program % (GROUP * COLUMN_TILES)
    return group * GROUP + inside % size, inside // size


@triton.jit
def _load_rows(rows_ptr, row, depth, end, DEPTH: tl.constexpr, FP32: tl.constexpr):
    place = row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    value = tl.load(rows_ptr + place, mask=(row < end)[:, None] & (depth < DEPTH)[None, :], other=0)
    return value.to(tl.float32) if FP32 else value


@triton.jit
def _load_weight(
    weight_ptr, depth, column, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, FP32: tl.constexpr
):
    """``[depth, column]`` of an expert's weight, which is stored as ``[COLUMNS, DEPTH]`` where it is transposed."""
    if TRANSPOSED:
        place = column.to(tl.int64)[None, :] * DEPTH + depth[:, None]
    else:
        place = depth.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    value = tl.load(weight_ptr + place, mask=(depth < DEPTH)[:, None] & (column < COLUMNS)[None, :], other=0)
    return value.to(tl.float32) if FP32 else value


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _product_kernel(
    rows_ptr, weight_ptr, counts_ptr, out_ptr, rows, row_tiles, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``out = rows @ weight[e]``, the weight transposed or not."""
    tile, column_tile = _swizzle(tl.program_id(0), row_tiles, tl.cdiv(COLUMNS, BLOCK_C), GROUP)
    expert, start, end = _find_tile(counts_ptr, tile, rows, EXPERTS, BLOCK_E, BLOCK_R)
    if expert > EXPERTS:
        return
    row = start + tl.arange(0, BLOCK_R)
    column = column_tile * BLOCK_C + tl.arange(0, BLOCK_C)
    weight_ptr += expert.to(tl.int64) * DEPTH * COLUMNS
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, tl.where(expert < EXPERTS, DEPTH, 0), BLOCK_K):
        depth = first + tl.arange(0, BLOCK_K)
        a = _load_rows(rows_ptr, row, depth, end, DEPTH, FP32)
        b = _load_weight(weight_ptr, depth, column, DEPTH, COLUMNS, TRANSPOSED, FP32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(
        out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < COLUMNS)[None, :]
    )


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _swiglu_kernel(
    rows_ptr, weight_ptr, counts_ptr, out_ptr, product_ptr, rows, row_tiles, EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``product = rows @ weight[e].T``, gate and up, and ``out = silu(gate) * up`` of its COLUMNS columns each."""
    tile, column_tile = _swizzle(tl.program_id(0), row_tiles, tl.cdiv(COLUMNS, BLOCK_C), GROUP)
    expert, start, end = _find_tile(counts_ptr, tile, rows, EXPERTS, BLOCK_E, BLOCK_R)
    if expert > EXPERTS:
        return
    row = start + tl.arange(0, BLOCK_R)
    column = column_tile * BLOCK_C + tl.arange(0, BLOCK_C)
    gate_ptr = weight_ptr + expert.to(tl.int64) * 2 * DEPTH * COLUMNS
    up_ptr = gate_ptr + DEPTH * COLUMNS
    gate = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    up = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, tl.where(expert < EXPERTS, DEPTH, 0), BLOCK_K):
        depth = first + tl.arange(0, BLOCK_K)
        a = _load_rows(rows_ptr, row, depth, end, DEPTH, FP32)
        b = _load_weight(gate_ptr, depth, column, DEPTH, COLUMNS, True, FP32)
        gate = tl.dot(a, b, gate, input_precision=PRECISION)
        b = _load_weight(up_ptr, depth, column, DEPTH, COLUMNS, True, FP32)
        up = tl.dot(a, b, up, input_precision=PRECISION)
    mask = (row < end)[:, None] & (column < COLUMNS)[None, :]
    rounded_gate = gate.to(out_ptr.dtype.element_ty)
    rounded_up = up.to(out_ptr.dtype.element_ty)
    place = row.to(tl.int64)[:, None] * 2 * COLUMNS + column[None, :]
    tl.store(product_ptr + place, rounded_gate, mask=mask)
    tl.store(product_ptr + place + COLUMNS, rounded_up, mask=mask)
    gate = rounded_gate.to(tl.float32)  # what backward will see
    out = gate / (1 + tl.exp(-gate)) * rounded_up.to(tl.float32)
    place = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(
    grad_ptr, product_ptr, out_ptr, COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = column < COLUMNS
    place = row * 2 * COLUMNS + column
    gate = tl.load(product_ptr + place, mask=mask, other=0).to(tl.float32)
    up = tl.load(product_ptr + place + COLUMNS, mask=mask, other=0).to(tl.float32)
    grad = tl.load(grad_ptr + row * COLUMNS + column, mask=mask, other=0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out_ptr + place, grad_gate.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + place + COLUMNS, (grad * gate * sigmoid).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _grad_weight_kernel(
    grad_ptr, rows_ptr, counts_ptr, out_ptr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, FFN: tl.constexpr,
    WIDTH: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out[e] = grad.T @ rows`` over the rows of e: the programs of one expert follow each other."""
    TILES_D: tl.constexpr = tl.cdiv(WIDTH, BLOCK_D)
    TILES: tl.constexpr = tl.cdiv(FFN, BLOCK_F) * TILES_D
    expert = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + experts, mask=experts < EXPERTS, other=0).to(tl.int32)
    start = tl.sum(tl.where(experts < expert, counts, 0), axis=0)
    end = start + tl.sum(tl.where(experts == expert, counts, 0), axis=0)
    f = tile // TILES_D * BLOCK_F + tl.arange(0, BLOCK_F)
    d = tile % TILES_D * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    for first in range(start, end, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        inside = row < end
        place = row.to(tl.int64)[None, :] * FFN + f[:, None]
        a = tl.load(grad_ptr + place, mask=inside[None, :] & (f < FFN)[:, None], other=0)
        b = _load_rows(rows_ptr, row, d, end, WIDTH, FP32)
        total = tl.dot(a.to(tl.float32) if FP32 else a, b, total, input_precision=PRECISION)
    place = (expert.to(tl.int64) * FFN + f[:, None]) * WIDTH + d[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=(f < FFN)[:, None] & (d < WIDTH)[None, :])


def grouped_linear(rows_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return _product(rows_ND, weight_EFD, counts_E, columns=weight_EFD.shape[1], transposed=True)


def grouped_linear_grad_rows(grad_NF: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return _product(grad_NF, weight_EFD, counts_E, columns=weight_EFD.shape[2], transposed=False)


def _product(rows_NI: Tensor, weight: Tensor, counts_E: Tensor, *, columns: int, transposed: bool) -> Tensor:
    rows, experts = rows_NI.shape[0], weight.shape[0]
    out = rows_NI.new_empty(rows, columns)
    if out.numel():
        options = _options(rows_NI, rows, columns, experts)
        row_tiles = _row_tiles(rows, experts, options["BLOCK_R"])
        _product_kernel[(row_tiles * triton.cdiv(columns, options["BLOCK_C"]),)](
            rows_NI, weight, counts_E.contiguous(), out, rows, row_tiles, **_expert_sizes(experts),
            DEPTH=rows_NI.shape[1], COLUMNS=columns, TRANSPOSED=transposed, GROUP=_GROUP, **options,
        )  # fmt: skip
    return out


def grouped_swiglu(rows_ND: Tensor, gate_up_EFD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    rows, experts, columns = rows_ND.shape[0], gate_up_EFD.shape[0], gate_up_EFD.shape[1] // 2
    out, product = rows_ND.new_empty(rows, columns), rows_ND.new_empty(rows, 2 * columns)
    if out.numel():
        options = _options(rows_ND, rows, columns, experts, results=2)
        row_tiles = _row_tiles(rows, experts, options["BLOCK_R"])
        _swiglu_kernel[(row_tiles * triton.cdiv(columns, options["BLOCK_C"]),)](
            rows_ND, gate_up_EFD, counts_E.contiguous(), out, product, rows, row_tiles, **_expert_sizes(experts),
            DEPTH=rows_ND.shape[1], COLUMNS=columns, GROUP=_GROUP, **options,
        )  # fmt: skip
    return out, product


def swiglu_backward(grad_NF: Tensor, product_NF: Tensor) -> Tensor:
    rows, columns = grad_NF.shape
    out = torch.empty_like(product_NF)
    if out.numel():
        block = min(_ELEMENTS, triton.next_power_of_2(columns))
        grid = (rows, triton.cdiv(columns, block))
        _swiglu_backward_kernel[grid](grad_NF, product_NF, out, COLUMNS=columns, BLOCK_C=block)
    return out


def grouped_linear_grad_weight(grad_NF: Tensor, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
    experts, ffn, width = counts_E.shape[0], grad_NF.shape[1], rows_ND.shape[1]
    out = rows_ND.new_empty(experts, ffn, width)
    if out.numel():
        options = _options(rows_ND, ffn * experts, width, experts)
        options["BLOCK_F"], options["BLOCK_D"] = options.pop("BLOCK_R"), options.pop("BLOCK_C")
        tiles = triton.cdiv(ffn, options["BLOCK_F"]) * triton.cdiv(width, options["BLOCK_D"])
        sizes = {**_expert_sizes(experts), "FFN": ffn, "WIDTH": width}
        _grad_weight_kernel[(experts * tiles,)](grad_NF, rows_ND, counts_E.contiguous(), out, **sizes, **options)
    return out


def _row_tiles(rows: int, experts: int, block: int) -> int:
    """As many as any counts need: the last tile of each group, the rows of no expert being one, may hold one row."""
    return (rows + (experts + 1) * (block - 1)) // block


def _expert_sizes(experts: int) -> dict[str, int]:
    return {"EXPERTS": experts, "BLOCK_E": triton.next_power_of_2(experts + 1)}


def _options(x: Tensor, rows_of_result: int, columns: int, experts: int, results: int = 1) -> dict[str, Any]:
    """Sizes and launch options: tiles of 128 x 128 in all, or of 64 x 64 in fp32, less where the result is less."""
    fp32 = x.dtype == torch.float32
    largest = 64 if fp32 else 128
    few = rows_of_result < largest * experts  # then most tiles would be half empty
    return {
        "BLOCK_R": largest // 2 if few else largest,
        "BLOCK_C": max(16, min(largest // results, triton.next_power_of_2(columns))),
        "BLOCK_K": 32 if fp32 else 64,
        "FP32": fp32 or interpreting(),  # the interpreter computes bf16 wrongly
        "PRECISION": "tf32" if fp32 and torch.get_float32_matmul_precision() != "highest" else "ieee",
        "num_warps": 4 if fp32 or few else 8,
        "num_stages": _STAGES,
    }


def _compiled(dtype: str) -> tuple[Compiled, ...]:
    x, width, ffn, experts = f"*{dtype}", 2048, 768, 128
    fp32 = dtype == "fp32"
    block = 64 if fp32 else 128
    shared = {**_expert_sizes(experts), "FP32": fp32, "PRECISION": "ieee", "BLOCK_K": 32 if fp32 else 64}
    tiles = {**shared, "BLOCK_R": block, "GROUP": _GROUP}
    launch: dict[str, Any] = {"num_warps": 4 if fp32 else 8, "num_stages": _STAGES}
    pointers = {"rows_ptr": x, "weight_ptr": x, "counts_ptr": "*i64", "out_ptr": x}
    sizes = {"rows": "i32", "row_tiles": "i32"}

    def entry(kernel: Any, types: dict[str, str], constants: dict[str, Any], variant: str = dtype) -> Compiled:
        return Compiled(
            kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants, **launch, variant=variant
        )

    forward = {**tiles, "DEPTH": ffn, "COLUMNS": width, "TRANSPOSED": True, "BLOCK_C": block}
    backward = {**forward, "DEPTH": width, "COLUMNS": ffn, "TRANSPOSED": False}
    swiglu = {**tiles, "DEPTH": width, "COLUMNS": ffn, "BLOCK_C": block // 2}
    weight = {**shared, "FFN": ffn, "WIDTH": width, "BLOCK_F": block, "BLOCK_D": block}
    elementwise = {"grad_ptr": x, "product_ptr": x, "out_ptr": x}
    grad_weight = {"grad_ptr": x, "rows_ptr": x, "counts_ptr": "*i64", "out_ptr": x}
    return (
        entry(_product_kernel, {**pointers, **sizes}, forward, f"forward {dtype}"),
        entry(_product_kernel, {**pointers, **sizes}, backward, f"grad_rows {dtype}"),
        entry(_swiglu_kernel, {**pointers, "product_ptr": x, **sizes}, swiglu),
        entry(_swiglu_backward_kernel, elementwise, {"COLUMNS": ffn, "BLOCK_C": 1024}),
        entry(_grad_weight_kernel, grad_weight, weight),
    )


COMPILED: tuple[Compiled, ...] = (*_compiled("bf16"), *_compiled("fp32"))
