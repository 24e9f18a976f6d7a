"""TrainerClient: what the controller may ask of training; inline it is the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from archon.batch import PackedBatch
from archon.engine import Publication
from archon.losses import LossSpec, TokenOutputs


@runtime_checkable
class TrainerClient(Protocol):
    """One model under training, in this process or in N workers behind the client.

    Batches go in once and columns come back once, on the CPU, in input order. A loss crosses as a LossSpec.
    """

    version: int

    def train_step(self, batch: PackedBatch, loss: LossSpec, *, n_minibatches: int = 1) -> dict[str, float]: ...
    def forward(self, batch: PackedBatch, what: Sequence[str] = ("logprobs",)) -> TokenOutputs: ...
    def publish(self) -> Publication: ...
    def save(self, path: str | Path, kind: Literal["hf", "checkpoint"] = "hf") -> None: ...
    def load(self, path: str | Path) -> None: ...
    def digest(self) -> str:
        """Of the fp32 weights."""
        ...

    def health(self) -> dict[str, Any]: ...
