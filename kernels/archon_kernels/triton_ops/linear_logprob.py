"""The passes over a tile of logits of the LM head; the references in ``archon_kernels.logprob_tiles`` state them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from archon_kernels.triton_ops import Compiled

_BLOCK = 4096
"""Columns that a program holds at a time."""


def statistics(
    logits_MC: Tensor,
    bias_C: Tensor | None,
    temperature: Tensor | None,
    softcap: float,
    target_M: Tensor,
    with_entropy: bool,
    running_M4: Tensor,
) -> None:
    """One program per row."""
    rows, columns = logits_MC.shape
    block = _block(columns)
    _statistics_kernel[(rows,)](
        logits_MC,
        logits_MC if bias_C is None else bias_C,
        logits_MC if temperature is None else temperature,
        target_M.contiguous(),
        running_M4,
        columns,
        softcap,
        HAS_BIAS=bias_C is not None,
        HAS_TEMPERATURE=temperature is not None,
        CAPPED=softcap != 0,
        WITH_ENTROPY=with_entropy,
        BLOCK=block,
        num_warps=_warps(block),
    )


def gradient(
    logits_MC: Tensor,
    bias_C: Tensor | None,
    temperature: Tensor | None,
    softcap: float,
    logsumexp_M: Tensor,
    pull_M3: Tensor,
    chosen_MN: Tensor,
    pull_chosen_MN: Tensor,
    out_MC: Tensor,
) -> None:
    """One program per row and block of columns, so a row may overwrite its logits."""
    rows, columns = logits_MC.shape
    block = _block(columns)
    _gradient_kernel[(rows, triton.cdiv(columns, block))](
        logits_MC,
        logits_MC if bias_C is None else bias_C,
        logits_MC if temperature is None else temperature,
        logsumexp_M.contiguous(),
        pull_M3.contiguous(),
        chosen_MN.contiguous(),
        pull_chosen_MN.contiguous(),
        out_MC,
        columns,
        chosen_MN.shape[1],
        softcap,
        HAS_BIAS=bias_C is not None,
        HAS_TEMPERATURE=temperature is not None,
        CAPPED=softcap != 0,
        BLOCK=block,
        num_warps=_warps(block),
    )


def _block(columns: int) -> int:
    return min(_BLOCK, max(64, triton.next_power_of_2(columns)))


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


@triton.jit
def _tanh(x):
    size = tl.minimum(tl.abs(x), 20.0)
    square = size * size
    # a series where 1 - 2 / (exp(2x) + 1) would cancel
    series = -0.0539682540 + square * (0.0218694885 - square * 0.00886323553)
    small = size + size * square * (-0.333333333 + square * (0.133333333 + square * series))
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    value = tl.where(size < 0.35, small, large)
    return tl.where(x < 0, -value, value)


@triton.jit
def _read(
    logits,
    bias,
    temperature,
    row,
    offsets,
    columns,
    softcap,
    wide: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Scores of a block of columns, and the derivative of the cap, or 1."""
    inside = offsets < columns
    scores = tl.load(logits + row * columns + offsets, mask=inside, other=0.0).to(wide)
    slope = 1.0
    if HAS_BIAS:
        scores += tl.load(bias + offsets, mask=inside, other=0.0)
    if CAPPED:
        bounded = _tanh(scores / softcap)
        scores = bounded * softcap
        slope = 1.0 - bounded * bounded
    if HAS_TEMPERATURE:
        scores = scores / tl.load(temperature + row)
    return scores, slope


@triton.jit
def _statistics_kernel(
    logits,
    bias,
    temperature,
    target,
    running,
    columns,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wide: tl.constexpr = running.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(target + row)
    peak = tl.load(running + row * 4)
    total = tl.load(running + row * 4 + 1)
    score = tl.load(running + row * 4 + 2)
    weighted = tl.load(running + row * 4 + 3)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scores, _ = _read(
            logits, bias, temperature, row, offsets, columns, softcap, wide, HAS_BIAS, HAS_TEMPERATURE, CAPPED
        )
        inside = offsets < columns
        largest = tl.maximum(peak, tl.max(tl.where(inside, scores, peak), 0))
        shrink = tl.exp(peak - largest)
        below = scores - largest
        p = tl.where(inside, tl.exp(below), 0.0)
        if WITH_ENTROPY:
            # nothing is summed yet where the peak is still the lowest number, and its distance may be infinite
            moved = tl.where(total > 0, (weighted + total * (peak - largest)) * shrink, 0.0)
            weighted = moved + tl.sum(p * tl.where(inside, below, 0.0), 0)
        total = total * shrink + tl.sum(p, 0)
        if (index >= start) & (index < start + BLOCK) & (index < columns):
            score = tl.sum(tl.where(offsets == index, scores, 0.0), 0)
        peak = largest
    tl.store(running + row * 4, peak)
    tl.store(running + row * 4 + 1, total)
    tl.store(running + row * 4 + 2, score)
    tl.store(running + row * 4 + 3, weighted)


@triton.jit
def _gradient_kernel(
    logits,
    bias,
    temperature,
    logsumexp,
    pulls,
    chosen,
    pull_chosen,
    out,
    columns,
    choices,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wide: tl.constexpr = logsumexp.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores, slope = _read(
        logits, bias, temperature, row, offsets, columns, softcap, wide, HAS_BIAS, HAS_TEMPERATURE, CAPPED
    )
    pull = tl.load(pulls + row * 3)
    pull_entropy = tl.load(pulls + row * 3 + 1)
    entropy = tl.load(pulls + row * 3 + 2)
    logp = scores - tl.load(logsumexp + row)
    grad = -tl.exp(logp) * (pull + pull_entropy * (logp + entropy))
    for choice in range(choices):
        index = tl.load(chosen + row * choices + choice)
        grad += tl.where(offsets == index, tl.load(pull_chosen + row * choices + choice), 0.0)
    if HAS_TEMPERATURE:
        grad = grad / tl.load(temperature + row)
    tl.store(out + row * columns + offsets, (grad * slope).to(out.dtype.element_ty), mask=offsets < columns)


def _compiled() -> tuple[Compiled, ...]:
    found: list[Compiled] = []
    for storage in ("bf16", "fp32"):
        for plain in (True, False):
            variant = f"{storage}{'' if plain else ', bias, temperature, softcap, entropy'}"
            options: dict[str, Any] = {"HAS_BIAS": not plain, "HAS_TEMPERATURE": not plain, "CAPPED": not plain}
            shared = {"logits": f"*{storage}", "bias": f"*{storage if plain else 'fp32'}"}
            shared["temperature"] = shared["bias"]
            sizes = {"columns": "i32", "softcap": "fp32"}
            constants = {**options, "WITH_ENTROPY": not plain, "BLOCK": _BLOCK}
            found.append(
                Compiled(
                    _statistics_kernel,
                    {
                        **shared,
                        "target": "*i64",
                        "running": "*fp32",
                        **sizes,
                        **dict.fromkeys(constants, "constexpr"),
                    },
                    constants,
                    num_warps=_warps(_BLOCK),
                    variant=variant,
                )
            )
            constants = {**options, "BLOCK": _BLOCK}
            found.append(
                Compiled(
                    _gradient_kernel,
                    {
                        **shared,
                        "logsumexp": "*fp32",
                        "pulls": "*fp32",
                        "chosen": "*i64",
                        "pull_chosen": "*fp32",
                        "out": f"*{storage}",
                        "columns": "i32",
                        "choices": "i32",
                        "softcap": "fp32",
                        **dict.fromkeys(constants, "constexpr"),
                    },
                    constants,
                    num_warps=_warps(_BLOCK),
                    variant=variant,
                )
            )
    return tuple(found)


COMPILED: tuple[Compiled, ...] = _compiled()
