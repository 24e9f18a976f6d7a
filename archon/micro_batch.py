"""How a batch is dealt to data ranks and cut into micro-batches, and one micro-batch as one rank computes it.

Every rank has the whole batch and makes the same plan, so nothing is communicated here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archon.batch import PackedBatch, balanced_bins, micro_batches, mini_batches
from archon.losses import TokenOutputs
from archon.mesh import Ranks
from archon.models.config import ModelConfig
from archon.models.decoder import Head
from archon.options import Options
from archon.parallel.collectives import gather_outputs
from archon.parallel.context import stream_multiple, stream_order
from archon.parallel.expert import Routing
from archon.parallel.stages import num_stages

_FILLER_TOKENS = 128
"""Longest filler document: attention over a longer one would cost more than it fills."""


@dataclass(frozen=True)
class Slot:
    """One turn of all ranks: the sequences that this rank's data share trains in it, and its padded size in tokens."""

    sequences: list[int]
    tokens: int


def plan_slots(batch: PackedBatch, max_tokens: int, ranks: Ranks, config: ModelConfig, options: Options) -> list[Slot]:
    """Deal a batch to data ranks and cut each share into as many micro-batches as the largest share needs.

    A micro-batch has at most ``max(max_tokens, longest unit)`` tokens, before it is padded to what the layout divides.
    In a pipeline all of them have the same size, and their number is one that the schedule runs.
    """
    shares = mini_batches(batch, ranks.num_data)
    shares += [[]] * (ranks.num_data - len(shares))
    parts = [batch.select(share) for share in shares]
    lengths = batch.lengths.tolist()
    budget = max([max_tokens, *(sum(lengths[index] for index in unit) for unit in batch.units())])
    bins = [micro_batches(part, budget) for part in parts]
    count = max(map(len, bins))
    if ranks.layout.pipeline > 1:
        count = _pipeline_count(count, ranks, config, options)
        bins = [_respread(part, found, count, budget) for part, found in zip(parts, bins, strict=True)]
    bins = [found + [[]] * (count - len(found)) for found in bins]
    sizes = [[int(part.lengths[chosen].sum()) for chosen in found] for part, found in zip(parts, bins, strict=True)]
    share, mine = shares[ranks.data_index], ranks.data_index
    multiple = token_multiple(ranks)
    slots = []
    for number, chosen in enumerate(bins[mine]):
        tokens = sizes[mine][number]
        if ranks.layout.pipeline > 1:
            tokens = max(map(max, sizes))
        elif _experts_span_data(ranks):
            tokens = max(size[number] for size in sizes)
        slots.append(Slot([share[index] for index in chosen], multiple * max(1, math.ceil(tokens / multiple))))
    return slots


def token_multiple(ranks: Ranks) -> int:
    """What the tokens of a micro-batch must divide by, so that every context and tensor rank has as many."""
    groups, tensor = ranks.context_groups, ranks.layout.tensor
    return tensor if groups.size == 1 else tensor * stream_multiple(groups.ring_size, groups.ulysses_size)


def _experts_span_data(ranks: Ranks) -> bool:
    """Whether expert-tensor ranks, which gather each other's tokens, belong to different data ranks."""
    return ranks.layout.context * ranks.layout.tensor % ranks.layout.expert_tensor != 0


def _pipeline_count(count: int, ranks: Ranks, config: ModelConfig, options: Options) -> int:
    """The next number of micro-batches that fills the pipeline and that its schedule can run."""
    stages = num_stages(ranks.layout, config.num_hidden_layers, options)
    if options.pp_schedule in ("1F1B", "ZBVZeroBubble"):
        return max(count, stages)
    return math.ceil(count / ranks.layout.pipeline) * ranks.layout.pipeline


def _respread(part: PackedBatch, found: list[list[int]], count: int, max_tokens: int) -> list[list[int]]:
    """The units of a share over ``count`` micro-batches of similar size; as found where that would break the bound."""
    if part.num_sequences == 0:
        return found
    units, lengths = part.units(), part.lengths.tolist()
    sizes = [sum(lengths[index] for index in unit) for unit in units]
    spread = balanced_bins(sizes, count)
    if max(sum(sizes[unit] for unit in chosen) for chosen in spread) > max_tokens:
        return found
    return [sorted(index for unit in chosen for index in units[unit]) for chosen in spread]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch on one rank.

    Attributes:
        batch: its sequences, whole, on the device; None if the micro-batch is nothing but filler.
        sequences: where they stand in the batch it was cut from.
        input_ids, position_ids: ``[T/c]`` of this context rank.
        cu_seqlens: borders of all documents, filler included.
        head: what the last stage computes.
        routing: what the routers read and write; None without experts.
        stream: ``[T]`` packed position of every token, by context rank; None with one.
    """

    batch: PackedBatch | None
    sequences: list[int]
    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    head: Head
    routing: Routing | None
    stream: Tensor | None
    ranks: Ranks

    @classmethod
    def build(
        cls,
        batch: PackedBatch,
        slot: Slot,
        what: Sequence[str],
        ranks: Ranks,
        device: torch.device,
        routing: dict[str, Any] | None,
    ) -> MicroBatch:
        """Take the sequences of a slot out of a batch, pad them, and keep what this rank computes.

        Args:
            what: columns that the head returns.
            routing: what ``Routers.arguments`` gives for a model with experts, else None.
        """
        part = batch.select(slot.sequences)
        filler = slot.tokens - part.num_tokens
        ends = torch.arange(part.num_tokens, slot.tokens, _FILLER_TOKENS)[1:]
        borders = [part.cu_seqlens, ends, *([torch.tensor([slot.tokens])] if filler else [])]
        input_ids = _pad(part.input_ids, filler)
        positions = torch.cat([part.position_ids, torch.arange(filler) % _FILLER_TOKENS])
        predicts = _pad(part.loss_mask, filler).roll(-1)
        stream = mine = None
        if ranks.context is not None:
            groups = ranks.context_groups
            stream = stream_order(slot.tokens, groups.ring_size, groups.ulysses_size)
            mine = stream.chunk(groups.size)[groups.rank]
        local_rows = (predicts if mine is None else predicts[mine]).nonzero().squeeze(-1)
        rows = local_rows if mine is None else mine[local_rows]
        temperature = None
        if "temperature" in part.sequences:
            temperature = part["temperature"].float().repeat_interleave(part.lengths)[rows].to(device)
        head = Head(local_rows.to(device), input_ids.roll(-1)[rows].to(device), temperature, tuple(what))
        return cls(
            batch=part.to(device) if slot.sequences else None,
            sequences=slot.sequences,
            input_ids=(input_ids if mine is None else input_ids[mine]).to(device),
            position_ids=(positions if mine is None else positions[mine]).to(device),
            cu_seqlens=torch.cat(borders),
            head=head,
            routing=None if routing is None else _routing(part, slot.tokens, mine, ranks, device, **routing),
            stream=None if stream is None else stream.to(device),
            ranks=ranks,
        )

    def outputs(self, columns_CT: Tensor) -> TokenOutputs:
        """What a loss reads: columns by token over whole sequences, from the head's columns by row of this rank.

        Raises:
            ValueError: there is no sequence here.
        """
        if self.batch is None:
            raise ValueError("a micro-batch of filler has no outputs")
        gathered = gather_outputs(columns_CT.t(), self.ranks.context)
        if self.stream is not None:
            gathered = gathered.index_select(0, self.stream.argsort())
        by_row = gathered[: self.batch.num_tokens]
        found: dict[str, Tensor] = {}
        for name, column in zip(self.head.outputs, by_row.unbind(1), strict=True):
            by_token = column.roll(1)
            if name == "values":
                starts = self.batch.cu_seqlens[:-1]
                found["values"] = by_token.index_fill(0, starts, 0.0)
                found["last_value"] = column[self.batch.cu_seqlens[1:] - 1]
            else:
                found[name] = torch.where(self.batch.loss_mask, by_token, 0.0)
        return TokenOutputs(**found)


def own_tokens(tokens: int, mine: Tensor | None, ranks: Ranks) -> Tensor:
    """``[S]`` packed positions of the tokens of this rank between blocks, given those of its context rank."""
    positions = torch.arange(tokens) if mine is None else mine
    return positions.chunk(ranks.layout.tensor)[ranks.place.tensor]


def _routing(
    part: PackedBatch,
    tokens: int,
    mine: Tensor | None,
    ranks: Ranks,
    device: torch.device,
    *,
    aux_scale: float,
    z_scale: float,
    recorded: Mapping[int, int],
) -> Routing:
    own = own_tokens(tokens, mine, ranks)
    real = own < part.num_tokens
    filler = tokens - part.num_tokens
    choices: dict[int, Tensor] = {}
    if recorded:
        column = part["routed_experts"].long()
        column = torch.cat([column, column.new_full((filler, *column.shape[1:]), -1)])[own].to(device)
        choices = {layer: column[:, place] for layer, place in recorded.items()}
    return Routing(
        real=real.to(device),
        sequence_ids=_pad(part.sequence_ids, filler)[own].to(device),
        lengths=part.lengths.to(device) if part.num_sequences else torch.ones(1, dtype=torch.long, device=device),
        tokens=own.to(device),
        aux_scale=aux_scale,
        z_scale=z_scale,
        recorded=choices,
    )


def _pad(column: Tensor, filler: int) -> Tensor:
    return torch.cat([column, column.new_zeros(filler)]) if filler else column
