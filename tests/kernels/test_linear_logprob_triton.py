"""linear_logprob with its Triton passes in the interpreter, against the reference, whose own tests say why it is right.

Tolerances: as of the reference against fp64, 1e-5 absolute and 1e-5 of the gradient's norm in fp32; in bf16 both round
the same logits, so only the rounding of the gradients differs: 1e-2 of the norm.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import archon_kernels.linear_logprob as linear_logprob_module
from archon_kernels import logprob_tiles
from archon_kernels.linear_logprob import linear_logprob

pytestmark = pytest.mark.slow  # the interpreter takes milliseconds per program


def run(
    rows: int, vocab: int, dtype: torch.dtype, plain: bool, masked: bool = False, tile_elements: int | None = None
) -> list[Tensor]:
    """Values and gradients, of log-probabilities alone or with every option."""
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden = (torch.randn(rows, 8, generator=generator) * 0.5).to(dtype)
    weight = torch.randn(vocab, 8, generator=generator).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    mask = torch.rand(rows, generator=generator) < 0.5 if masked else None
    if mask is not None:
        hidden[~mask] = torch.nan
    bias, temperature = torch.randn(vocab, generator=generator), torch.rand(rows, generator=generator) + 0.5
    pull = torch.randn(4, rows, generator=generator)
    h, w, b = (x.requires_grad_() for x in (hidden, weight, bias))
    if plain:
        logprobs = linear_logprob(h, w, targets, mask_M=mask, tile_elements=tile_elements).logprobs
        (logprobs * pull[0]).sum().backward()
        return [logprobs.detach(), h.grad, w.grad]
    logprobs, entropy, top, ids = linear_logprob(
        h,
        w,
        targets,
        bias_V=b,
        softcap=4.0,
        temperature=temperature,
        mask_M=mask,
        with_entropy=True,
        top_k=2,
        tile_elements=tile_elements,
    )
    assert entropy is not None and top is not None and ids is not None
    (logprobs * pull[0] + entropy * pull[1] + top[:, 0] * pull[2] + top[:, 1] * pull[3]).sum().backward()
    return [logprobs.detach(), entropy.detach(), top.detach(), ids, h.grad, w.grad, b.grad]


def compare(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    plain: bool,
    masked: bool = False,
    tile_elements: int | None = None,
) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "triton")
    ours = run(rows, vocab, dtype, plain, masked, tile_elements)
    monkeypatch.setenv("ARCHON_KERNELS", "reference")
    right = run(rows, vocab, dtype, plain, masked, tile_elements)
    for mine, expected in zip(ours, right, strict=True):
        if mine.dim() == 1 and mine.dtype == torch.float32 and mine.shape == right[0].shape:
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)
        elif mine.dtype == torch.int64:
            assert torch.equal(mine, expected)
        else:
            tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
            assert (mine.double() - expected.double()).norm() <= tolerance * max(float(expected.norm()), 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "every_option"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(("rows", "vocab"), [(0, 1009), (1, 1009), (7, 13), (129, 1009)])
def test_triton_equals_the_reference(
    rows: int, vocab: int, masked: bool, plain: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(monkeypatch, rows, vocab, dtype, plain, masked)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "every_option"])
def test_triton_equals_the_reference_over_a_large_vocabulary(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, 7, 151936, torch.float32, plain)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "every_option"])
def test_triton_over_several_tiles_equals_the_reference(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_tiles, "TILE_ROWS", 5)
    compare(monkeypatch, 13, 101, torch.float32, plain, tile_elements=5 * 40)


def test_triton_in_fp64_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics take the type of what they are summed in, so fp64 is not rounded to fp32 on the way."""
    values = []
    for implementation in ("triton", "reference"):
        monkeypatch.setenv("ARCHON_KERNELS", implementation)
        values.append(run(5, 11, torch.float64, True))
    for ours, right in zip(*values, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-13, rtol=1e-13)
