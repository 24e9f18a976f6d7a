"""How one model is spread over ranks: the grammar ``d4p2t2c2e4`` and the rank arithmetic behind it. Pure Python.

``d`` data shards, ``r`` replicas of those shards (HSDP), ``p`` pipeline stages, ``t`` tensor, ``c`` context and ``e``
expert parallel. A letter left out is 1. Attention uses d·r·p·t·c ranks; the experts of an MoE model reuse the same
ranks, folded differently, so ``e`` never adds any. The hybrid form ``(attn:d1p4t2c2|ffn:d1p4t1e4)`` also splits each
expert over ``t`` ranks and says how many data shards (``d``) the experts have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

_LETTERS = "drptce"
_HYBRID = re.compile(r"\(\s*attn\s*:\s*([^|()]*?)\s*\|\s*ffn\s*:\s*([^|()]*?)\s*\)")
_FIELDS = {"d": "data", "r": "replicas", "p": "pipeline", "t": "tensor", "c": "context", "e": "expert"}
_BELONGS = {"attn": "drptc", "ffn": "dpte"}


class Coordinates(NamedTuple):
    """Where a rank sits in the dense (attention) part of the model, outermost axis first."""

    pipeline: int
    replica: int
    data: int
    context: int
    tensor: int


class ExpertCoordinates(NamedTuple):
    """Where the same rank sits in the experts of an MoE model, outermost axis first."""

    pipeline: int
    replica: int
    expert_data: int
    expert: int
    expert_tensor: int


@dataclass(frozen=True)
class Layout:
    """Sizes of every axis. Ranks are ordered p, r, d, c, t with t innermost; experts fold d·c·t as ed, e, et.

    Raises ValueError when a size is below 1 or the experts do not fit the ranks of one stage and replica.
    """

    data: int = 1
    replicas: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    # Only remembers the spelling, so that a layout prints as it was written; both spellings are the same layout.
    hybrid: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in (*_FIELDS.values(), "expert_tensor"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"layout: {name} is {size}; every size must be at least 1")
        self._check_experts_fit()

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``d4p2t2c2e4`` (in any order) or ``(attn:d1p4t2c2|ffn:d1p4t1e4)``; ValueError says what to change."""
        text = text.strip()
        if "(" in text or "|" in text or ":" in text:
            return cls._parse_hybrid(text)
        sizes = _sizes(text, text, _LETTERS)
        return cls(**_by_field(sizes))

    @classmethod
    def _parse_hybrid(cls, text: str) -> Layout:
        match = _HYBRID.fullmatch(text)
        if match is None:
            raise ValueError(f"layout {text!r}: write d4p2t2c2e4, or (attn:d1p4t2c2|ffn:d1p4t1e4) with both parts")
        attn = _sizes(match[1], text, _BELONGS["attn"], part="attn")
        ffn = _sizes(match[2], text, _BELONGS["ffn"], part="ffn")
        stages, ffn_stages = attn.get("p", 1), ffn.get("p", 1)
        if ffn_stages != stages:
            raise ValueError(
                f"layout {text!r}: attn has p{stages} and ffn p{ffn_stages}, but a stage holds whole layers: "
                f"write p{stages} in both, or p{ffn_stages} in both"
            )
        layout = cls(
            **_by_field(attn),
            expert=ffn.get("e", 1),
            expert_tensor=ffn.get("t", 1),
            hybrid=True,
        )
        layout._check_expert_data(text, ffn.get("d", layout.expert_data))
        return layout

    def __str__(self) -> str:
        attn = "".join(
            f"{letter}{size}" for letter in "drptc" if (size := getattr(self, _FIELDS[letter])) > 1 or letter == "d"
        )
        expert = f"e{self.expert}" if self.expert > 1 else ""
        if not self.hybrid and self.expert_tensor == 1:
            return attn + expert
        stages = f"p{self.pipeline}" if self.pipeline > 1 else ""
        return f"(attn:{attn}|ffn:d{self.expert_data}{stages}t{self.expert_tensor}{expert})"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    @property
    def ranks_per_replica(self) -> int:
        """Ranks d·c·t of one stage and replica: those that the experts fold."""
        return self.data * self.context * self.tensor

    @property
    def expert_data(self) -> int:
        """Data shards of the experts: d·c·t ÷ (e·et)."""
        return self.ranks_per_replica // (self.expert * self.expert_tensor)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the dense axes by letter, outermost first."""
        return {"p": self.pipeline, "r": self.replicas, "d": self.data, "c": self.context, "t": self.tensor}

    @property
    def expert_axes(self) -> dict[str, int]:
        """Sizes of the expert axes, outermost first: p, r, ed (expert data), e, et (expert tensor)."""
        stage = {"p": self.pipeline, "r": self.replicas}
        return {**stage, "ed": self.expert_data, "e": self.expert, "et": self.expert_tensor}

    def coordinates(self, rank: int) -> Coordinates:
        """Dense coordinates of ``rank``; ValueError when there is no such rank."""
        return Coordinates(*self._unravel(rank, self.axes))

    def rank(self, coordinates: Coordinates) -> int:
        """The rank at these dense coordinates; ValueError when one lies outside its axis."""
        return _ravel(coordinates, self.axes)

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Expert coordinates of ``rank``; ValueError when there is no such rank."""
        return ExpertCoordinates(*self._unravel(rank, self.expert_axes))

    def expert_rank(self, coordinates: ExpertCoordinates) -> int:
        """The rank at these expert coordinates; ValueError when one lies outside its axis."""
        return _ravel(coordinates, self.expert_axes)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Every group of ranks that differ only along ``axes``, ordered by first rank; each group in rank order.

        ``groups("t")`` are the tensor-parallel groups and ``groups("d", "c")`` those over data and context together.
        Dense axes are p, r, d, c, t; expert axes p, r, ed, e, et. ValueError for an unknown axis or a mix of both.
        """
        for sizes in (self.axes, self.expert_axes):
            if axes and set(axes) <= set(sizes):
                return list(_groups(sizes, axes))
        raise ValueError(
            f"no groups along {axes!r}: name one or more of the dense axes {', '.join(self.axes)}, "
            f"or one or more of the expert axes {', '.join(self.expert_axes)}"
        )

    def _unravel(self, rank: int, sizes: Mapping[str, int]) -> list[int]:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"layout {self}: rank {rank} does not exist; its ranks are 0 to {self.world_size - 1}")
        coordinates = []
        for size in reversed(list(sizes.values())):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return coordinates[::-1]

    def _check_experts_fit(self) -> None:
        ranks, expert_tensor = self.ranks_per_replica, self.expert_tensor
        where = f"d{self.data} x c{self.context} x t{self.tensor} = {ranks} ranks of one stage and replica"
        if ranks % expert_tensor:
            raise ValueError(
                f"layout: ffn t{expert_tensor} does not divide the {where}: choose the ffn t from {_divisors(ranks)}"
            )
        if ranks % (self.expert * expert_tensor):
            split = f", split by ffn t{expert_tensor}" if expert_tensor > 1 else ""
            raise ValueError(
                f"layout: e{self.expert} does not divide the {where}{split}: "
                f"choose e from {_divisors(ranks // expert_tensor)}, or change d, c or t"
            )

    def _check_expert_data(self, text: str, expert_data: int) -> None:
        if expert_data != self.expert_data:
            ffn_world = self.replicas * self.pipeline * expert_data * self.expert * self.expert_tensor
            raise ValueError(
                f"layout {text!r}: attn uses {self.world_size} ranks and ffn {ffn_world}, but both use all ranks: "
                f"write d{self.expert_data} in ffn, or leave its d out"
            )


def parse_backend(text: str) -> tuple[str, Layout]:
    """Split ``archon:d4t2`` into the engine's name and its Layout; ValueError when either part is missing or wrong."""
    engine, colon, layout = text.strip().partition(":")
    if not colon or not re.fullmatch(r"[a-z][a-z0-9_]*", engine) or not layout.strip():
        raise ValueError(f"backend {text!r}: write the engine's name, a colon and a layout, as in archon:d4t2")
    return engine, Layout.parse(layout)


def _sizes(dims: str, text: str, letters: str, part: str = "") -> dict[str, int]:
    """Sizes by letter of ``dims``, such as ``d4p2``, in ``part`` (attn, ffn or the whole) of the layout ``text``."""
    where = f"layout {text!r}" + (f", {part} part" if part else "")
    if not dims:
        raise ValueError(f"{where}: nothing is written; one rank is d1")
    sizes: dict[str, int] = {}
    position = 0
    for match in re.finditer(r"([a-zA-Z])([0-9]*)", dims):
        if match.start() != position:
            break
        position = match.end()
        letter, size = match[1], match[2]
        if letter not in letters:
            raise ValueError(f"{where}: {_why_not(letter, part)}")
        if letter in sizes:
            raise ValueError(
                f"{where}: {letter} is written twice; keep one of {letter}{sizes[letter]} and {letter}{size}"
            )
        if not size or int(size) < 1:
            raise ValueError(f"{where}: {match[0]!r} has no size; write a number of at least 1, as in {letter}2")
        sizes[letter] = int(size)
    if position != len(dims):
        raise ValueError(f"{where}: cannot read {dims[position:]!r}; write letters with sizes, as in d4p2t2c2e4")
    return sizes


def _by_field(sizes: Mapping[str, int]) -> dict[str, Any]:
    return {_FIELDS[letter]: size for letter, size in sizes.items()}


def _why_not(letter: str, part: str) -> str:
    if letter not in _LETTERS:
        axes = ", ".join(f"{axis} ({name})" for axis, name in _FIELDS.items())
        return f"{letter!r} is no axis; the axes are {axes}"
    other = "ffn" if part == "attn" else "attn"
    return f"{letter} ({_FIELDS[letter]}) is not written in {part}; write it in {other}"


def _ravel(coordinates: tuple[int, ...], sizes: Mapping[str, int]) -> int:
    rank = 0
    for coordinate, (axis, size) in zip(coordinates, sizes.items(), strict=True):
        if not 0 <= coordinate < size:
            raise ValueError(f"coordinate {coordinate} lies outside axis {axis} of size {size}")
        rank = rank * size + coordinate
    return rank


def _groups(sizes: Mapping[str, int], axes: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    fixed = [range(1) if axis in axes else range(size) for axis, size in sizes.items()]
    moving = [range(size) if axis in axes else range(1) for axis, size in sizes.items()]
    offsets = [_ravel(coordinates, sizes) for coordinates in product(*moving)]
    for coordinates in product(*fixed):
        first = _ravel(coordinates, sizes)
        yield tuple(first + offset for offset in offsets)


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
