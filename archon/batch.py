"""PackedBatch: sequences laid end to end, cut into micro-batches of a token budget without padding."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """N sequences laid end to end over T tokens.

    Column t belongs to token t: ``logprobs[t]`` is log p(token t | tokens < t) and is 0 at the first token of a
    sequence, as is ``loss_mask``. Nobody above the engine shifts anything.

    Attributes:
        input_ids: ``[T]`` int64.
        cu_seqlens: ``[N+1]`` int64, ``cu_seqlens[0] == 0`` and ``cu_seqlens[-1] == T``; every sequence has a token.
        tokens: per-token columns ``[T, ...]``; ``position_ids`` (int64) and ``loss_mask`` (bool) always exist.
        sequences: per-sequence columns ``[N, ...]``. ``temperature`` (fp32), where present, divides the logits of its
            sequence. ``unit`` (int64), where present, marks sequences that are never split apart.

    Raises:
        ValueError: a column whose first dimension is neither T nor N, an empty sequence, or a trained first token.
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    tokens: dict[str, Tensor] = field(default_factory=dict)
    sequences: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", dict(self.tokens))
        num_tokens, lengths = self.input_ids.shape[0], self.lengths
        if self.cu_seqlens[0] != 0 or self.cu_seqlens[-1] != num_tokens:
            raise ValueError(f"cu_seqlens must run from 0 to {num_tokens}, got {self.cu_seqlens.tolist()[:8]}…")
        if (lengths <= 0).any():
            raise ValueError(f"sequence {int((lengths <= 0).nonzero()[0])} has no token; drop it before packing")
        if "position_ids" not in self.tokens:
            starts = self.cu_seqlens[:-1].repeat_interleave(lengths)
            self.tokens["position_ids"] = torch.arange(num_tokens, device=self.input_ids.device) - starts
        if "loss_mask" not in self.tokens:
            mask = torch.ones(num_tokens, dtype=torch.bool, device=self.input_ids.device)
            mask[self.cu_seqlens[:-1]] = False
            self.tokens["loss_mask"] = mask
        for name, column in self.tokens.items():
            if column.shape[0] != num_tokens:
                raise ValueError(f"token column {name!r} has {column.shape[0]} rows, the batch has {num_tokens} tokens")
        for name, column in self.sequences.items():
            if column.shape[0] != self.num_sequences:
                raise ValueError(
                    f"sequence column {name!r} has {column.shape[0]} rows, the batch has {self.num_sequences} sequences"
                )
        if self.loss_mask[self.cu_seqlens[:-1]].any():
            raise ValueError("loss_mask must be 0 at the first token of every sequence: nothing predicts it")

    @classmethod
    def from_sequences(cls, rows: Iterable[Mapping[str, Any]], *, sequence_columns: Sequence[str] = ()) -> PackedBatch:
        """Pack rows of columns; every row has ``input_ids`` and the same other columns.

        Args:
            rows: mappings from column name to a per-token list or tensor ``[L, ...]``, or, for the names in
                ``sequence_columns``, to one scalar or tensor.
            sequence_columns: the names that hold one value per sequence.

        Raises:
            ValueError: no rows, or a row whose columns differ in length.
        """
        rows = list(rows)
        if not rows:
            raise ValueError("cannot pack zero sequences")
        columns: dict[str, Tensor] = {}
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        for name in rows[0]:
            values = [torch.as_tensor(row[name]) for row in rows]
            if name in sequence_columns:
                columns[name] = torch.stack(values)
                continue
            for index, value in enumerate(values):
                if len(value) != lengths[index]:
                    raise ValueError(
                        f"column {name!r} of sequence {index} has {len(value)} entries for {lengths[index]} tokens"
                    )
            columns[name] = torch.cat(values)
        return cls(
            input_ids=columns.pop("input_ids").long(),
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
            tokens={
                name: column.bool() if name == "loss_mask" else column
                for name, column in columns.items()
                if name not in sequence_columns
            },
            sequences={name: columns[name] for name in sequence_columns if name in columns},
        )

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """``[N]`` tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def sequence_ids(self) -> Tensor:
        """``[T]`` index of the sequence that each token belongs to."""
        return torch.arange(self.num_sequences, device=self.cu_seqlens.device).repeat_interleave(self.lengths)

    @property
    def position_ids(self) -> Tensor:
        return self.tokens["position_ids"]

    @property
    def loss_mask(self) -> Tensor:
        return self.tokens["loss_mask"]

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    def __getitem__(self, name: str) -> Tensor:
        if name in self.tokens:
            return self.tokens[name]
        if name in self.sequences:
            return self.sequences[name]
        raise KeyError(f"no column {name!r}; the batch has {sorted([*self.tokens, *self.sequences])}")

    def with_tokens(self, **columns: Tensor) -> PackedBatch:
        """The same batch with per-token columns ``[T, ...]`` added or replaced."""
        return replace(self, tokens={**self.tokens, **columns})

    def with_sequences(self, **columns: Tensor) -> PackedBatch:
        """The same batch with per-sequence columns ``[N, ...]`` added or replaced."""
        return replace(self, sequences={**self.sequences, **columns})

    def to(self, device: torch.device | str) -> PackedBatch:
        return PackedBatch(
            self.input_ids.to(device),
            self.cu_seqlens.to(device),
            {name: column.to(device) for name, column in self.tokens.items()},
            {name: column.to(device) for name, column in self.sequences.items()},
        )

    def token_index(self, sequences: Sequence[int] | Tensor) -> Tensor:
        """``[T']`` positions of the tokens of the given sequences, in the given order."""
        chosen = torch.as_tensor(sequences, dtype=torch.long)
        lengths = self.lengths[chosen]
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
        offsets = (self.cu_seqlens[:-1][chosen] - starts).repeat_interleave(lengths)
        return offsets + torch.arange(int(lengths.sum()))

    def select(self, sequences: Sequence[int] | Tensor) -> PackedBatch:
        """The batch of the given sequences, in the given order."""
        chosen = torch.as_tensor(sequences, dtype=torch.long)
        index = self.token_index(chosen)
        return PackedBatch(
            self.input_ids[index],
            torch.cat([torch.zeros(1, dtype=torch.long), self.lengths[chosen].cumsum(0)]),
            {name: column[index] for name, column in self.tokens.items()},
            {name: column[chosen] for name, column in self.sequences.items()},
        )

    def units(self) -> list[list[int]]:
        """Sequence indices that stay together, in order of first appearance; one each without a ``unit`` column."""
        if "unit" not in self.sequences:
            return [[index] for index in range(self.num_sequences)]
        units: dict[int, list[int]] = {}
        for index, unit in enumerate(self.sequences["unit"].tolist()):
            units.setdefault(unit, []).append(index)
        return list(units.values())


def micro_batches(batch: PackedBatch, max_tokens: int) -> list[list[int]]:
    """Cut a batch into micro-batches of at most ``max(max_tokens, longest unit)`` tokens by first-fit decreasing.

    Returns sequence indices per micro-batch; units stay whole and every sequence appears once. The result depends only
    on the lengths and their order.
    """
    units, lengths = batch.units(), batch.lengths.tolist()
    sizes = [sum(lengths[index] for index in unit) for unit in units]
    budget = max([max_tokens, *sizes])
    bins: list[list[int]] = []
    room: list[int] = []
    for unit in sorted(range(len(units)), key=lambda u: (-sizes[u], u)):
        place = next((b for b, free in enumerate(room) if free >= sizes[unit]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(budget)
        bins[place].extend(units[unit])
        room[place] -= sizes[unit]
    return [sorted(indices) for indices in bins]


def mini_batches(batch: PackedBatch, count: int) -> list[list[int]]:
    """Deal a batch into at most ``count`` mini-batches with balanced token counts, one optimizer update each.

    Units stay whole and keep their order inside a mini-batch. A batch with fewer units than ``count`` gives fewer.
    """
    if count < 1:
        raise ValueError(f"a batch is dealt into {count} mini-batches; it takes at least 1")
    units, lengths = batch.units(), batch.lengths.tolist()
    count = min(count, len(units))
    sizes = [sum(lengths[index] for index in unit) for unit in units]
    shares: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    quota = -(-len(units) // count)
    for unit in sorted(range(len(units)), key=lambda u: (-sizes[u], u)):
        open_shares = [s for s in range(count) if len(shares[s]) < quota]
        share = min(open_shares, key=lambda s: (totals[s], s))
        shares[share].append(unit)
        totals[share] += sizes[unit]
    return [[index for unit in sorted(share) for index in units[unit]] for share in shares if share]


def balanced_bins(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices of ``sizes`` in ``count`` bins of similar sums: the largest first, each into the emptiest bin.

    Bins stay empty where there are fewer sizes.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        total, number = heapq.heappop(heap)
        bins[number].append(index)
        heapq.heappush(heap, (total + sizes[index], number))
    return bins
