"""Normalisation of rewards and advantages over the batch or over prompt groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal.algorithms.segments import segment_max, segment_sum

Level = Literal["batch", "group"]


@dataclass(frozen=True)
class NormSpec:
    """What to subtract and what to divide by: ``(x - mean) / (std + eps)``.

    Attributes:
        mean_level, std_level: over the ``batch``, over the prompt ``group``, or None: subtract or divide by nothing.
        mean_leave1out: the mean leaves the entry itself out, ``(S - x) / (n - 1)``.
        std_unbiased: divide the squared deviations by ``n - 1`` instead of ``n``.
        eps: added to the standard deviation.
    """

    mean_level: Level | None = "batch"
    mean_leave1out: bool = False
    std_level: Level | None = "batch"
    std_unbiased: bool = True
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("mean_level", "std_level"):
            if getattr(self, name) not in ("batch", "group", None):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is batch, group or null")
        if self.mean_leave1out and self.mean_level is None:
            raise ValueError("mean_leave1out needs a mean_level: set it to batch or group")
        if not self.eps >= 0:
            raise ValueError(f"eps is {self.eps}; it is added to a standard deviation and cannot be negative")


@torch.no_grad()
def normalize(
    values: Tensor,
    spec: NormSpec,
    *,
    mask: Tensor | None = None,
    groups: Tensor | None = None,
    entries: Tensor | None = None,
) -> Tensor:
    """Normalise the values under the mask; the others are absent from every statistic and come back as 0.

    A level whose values are all equal (a single one among them) carries no signal: what is divided by its standard
    deviation is 0, never a difference divided by ``eps``.

    Args:
        values: ``[M]`` floating point; computed in fp64, returned in its own dtype.
        spec: levels and options.
        mask: ``[M]`` bool, default all.
        groups: ``[M]`` integer group ids, any values, any sizes; needed when a level is ``group``.
        entries: ``[M]`` integer ids of the things counted, default one per value. Values that share an entry share its
            weight of one, so that an episode of many turns counts as much as one of a single turn. An entry lies in one
            group.

    Raises:
        ValueError: a level is ``group`` and there are no group ids.
    """
    if groups is None and "group" in (spec.mean_level, spec.std_level):
        raise ValueError("a level is group but no group ids were given: pass groups")
    kept = torch.arange(len(values), device=values.device) if mask is None else mask.nonzero().squeeze(-1)
    result = torch.zeros_like(values)
    if len(kept) == 0:
        return result
    x = values[kept].double()
    entry_ids = None if entries is None else _dense_ids(entries[kept])
    levels: dict[Level | None, _Statistics] = {}
    for level in {spec.mean_level, spec.std_level} - {None}:
        ids = _dense_ids(groups[kept]) if groups is not None and level == "group" else None
        levels[level] = _Statistics(x, ids, entry_ids)
    if spec.mean_level is not None:
        x = levels[spec.mean_level].centered(spec.mean_leave1out)
    if spec.std_level is not None:
        x = levels[spec.std_level].scaled(x, spec.std_unbiased, spec.eps)
    result[kept] = x.to(result.dtype)
    return result


def _dense_ids(ids: Tensor) -> Tensor:
    return torch.unique(ids, return_inverse=True)[1]


class _Statistics:
    """Statistics ``[G]`` of ``x [M]`` per segment (``ids [M]``; None: the batch), every entry weighing one."""

    def __init__(self, x: Tensor, ids: Tensor | None, entries: Tensor | None) -> None:
        self.x = x
        self.ids = torch.zeros_like(x, dtype=torch.int64) if ids is None else ids
        self.count = int(self.ids.max()) + 1
        self.entries = entries
        self.entry_sizes = None if entries is None else torch.bincount(entries).double()
        self.num_entries = self._sum(torch.ones_like(x)).round()
        self.mean = self._sum(x) / self.num_entries

    def _sum(self, values: Tensor) -> Tensor:
        if self.entries is not None and self.entry_sizes is not None:
            values = values / self.entry_sizes[self.entries]
        return segment_sum(values, self.ids, self.count)

    def centered(self, leave1out: bool) -> Tensor:
        if not leave1out:
            return self.x - self.mean[self.ids]
        own = self.x
        if self.entries is not None and self.entry_sizes is not None:
            own = (segment_sum(self.x, self.entries, len(self.entry_sizes)) / self.entry_sizes)[self.entries]
        others = ((self.mean * self.num_entries)[self.ids] - own) / (self.num_entries - 1).clamp(min=1)[self.ids]
        return torch.where((self.num_entries == 1)[self.ids], 0.0, self.x - others)

    def scaled(self, x: Tensor, unbiased: bool, eps: float) -> Tensor:
        """``x / (std + eps)``, and 0 where the segment has a single entry or no spread."""
        squares = self._sum((self.x - self.mean[self.ids]).square())
        std = (squares / (self.num_entries - int(unbiased)).clamp(min=1)).sqrt()
        spread = segment_max(self.x, self.ids, self.count) + segment_max(-self.x, self.ids, self.count)
        flat = (self.num_entries == 1) | (spread == 0)
        return torch.where(flat, 0.0, 1.0 / (std + eps))[self.ids] * x
