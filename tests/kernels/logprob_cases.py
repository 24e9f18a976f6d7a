"""linear_logprob against fp64 autograd over whole logits, for its tests in any implementation.

Tolerances, by the dtype of the inputs, which are the same for both: log-probs and entropy absolute, gradients of their
norm. In half precision the tile of logits, and each gradient, is rounded to it. Over a large vocabulary the gradient of
``hidden`` gets 1e-4 in fp32: torch's product of a few rows adds its 151,936 terms up one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from archon_kernels.linear_logprob import Logprobs, linear_logprob

TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (3e-2, 1e-2),
    torch.float16: (4e-3, 2e-3),
}
LARGE, LARGE_HIDDEN = 151_936, 1e-4
MASKS = ("none", "ones", "zeros", "random")
TOP_K = 3


def whole_logprobs(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    logits = hidden @ weight.T if bias_V is None else hidden @ weight.T + bias_V
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits if temperature is None else logits / temperature.double()[:, None], -1)


@dataclass(frozen=True, eq=False)
class Problem:
    """One set of inputs; under the mask, whatever has rows holds NaN or no token.

    Attributes:
        pulls: gradients of log-probs, entropy and top log-probs, as far as they are asked for.
        options: keyword arguments of ``linear_logprob`` that have no gradient.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    kept: Tensor
    pulls: list[Tensor]
    options: dict[str, Any]

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """hidden, weight and, if there is one, bias, to take gradients of."""
        given = [self.hidden, self.weight, *([] if self.bias is None else [self.bias])]
        return [x.to(dtype or x.dtype, copy=True).requires_grad_() for x in given]

    @cached_property
    def leaves64(self) -> list[Tensor]:
        return self.leaves(torch.float64)

    @cached_property
    def logprobs64(self) -> Tensor:
        """Of all tokens at the rows that are kept; computed once for every implementation."""
        hidden, weight, *bias = self.leaves64
        temperature = self.options.get("temperature")
        return whole_logprobs(
            hidden[self.kept],
            weight,
            bias_V=bias[0] if bias else None,
            softcap=self.options.get("softcap"),
            temperature=None if temperature is None else temperature[self.kept],
        )

    def check(self, **tiling: Any) -> Logprobs:
        """Values and gradients of the implementation that is chosen, over the rows that the mask leaves."""
        leaves = self.leaves()
        found = linear_logprob(
            *leaves[:2], self.targets, bias_V=None if self.bias is None else leaves[2], **self.options, **tiling
        )
        outputs = [x for x in found[:3] if x is not None]
        torch.autograd.backward(outputs, self.pulls)
        kept, log_p = self.kept, self.logprobs64
        right = [log_p.gather(1, self.targets[kept, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)]
        if found.top_ids is not None:
            right.append(log_p.gather(1, found.top_ids[kept]))
        right = right[: len(outputs)]
        gradients = torch.autograd.grad(
            right, self.leaves64, [pull[kept].double() for pull in self.pulls], retain_graph=True
        )
        values, relative = TOLERANCE[self.hidden.dtype]
        for ours, expected in zip(outputs, right, strict=True):
            torch.testing.assert_close(ours[kept].double(), expected, atol=values, rtol=0)
            assert not ours[~kept].any()
        if found.top_logprobs is not None:
            best = log_p.topk(TOP_K).values
            torch.testing.assert_close(found.top_logprobs[kept].double(), best, atol=values, rtol=0)
            assert (found.top_logprobs.diff(dim=1) <= 0).all()
        assert not leaves[0].grad[~kept].any()
        for name, leaf, expected in zip(("hidden", "weight", "bias"), leaves, gradients, strict=False):
            error = (leaf.grad.double() - expected).norm()
            summed = name == "hidden" and self.weight.shape[0] == LARGE
            limit = max(relative, LARGE_HIDDEN) if summed else relative
            assert leaf.grad.dtype == leaf.dtype and error <= limit * max(float(expected.norm()), 1e-3), name
        return found


def problem(
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    masked: str = "none",
    *,
    plain: bool = False,
    width: int = 16,
    share: float = 0.4,
) -> Problem:
    """Log-probs alone where ``plain``, else with every option; a random mask keeps ``share`` of the rows."""
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    hidden = (torch.randn(rows, width, generator=generator) * 0.5).to(dtype)
    weight = torch.randn(vocab, width, generator=generator).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    temperature, bias = torch.rand(rows, generator=generator) + 0.5, torch.randn(vocab, generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    shapes = [(rows,)] if plain else [(rows,), (rows,), (rows, TOP_K)]
    pulls = [torch.randn(shape, generator=generator).to(wide) for shape in shapes]
    kept = torch.rand(rows, generator=generator) < {"zeros": 0.0, "random": share}.get(masked, 1.0)
    for column in (hidden, temperature, *pulls):
        column[~kept] = torch.nan
    targets[~kept] = -100
    options: dict[str, Any] = {} if masked == "none" else {"mask_M": kept}
    if not plain:
        options |= {"softcap": 5.0, "temperature": temperature, "with_entropy": True, "top_k": TOP_K}
    return Problem(hidden, weight, None if plain else bias.to(wide), targets, kept, pulls, options)
