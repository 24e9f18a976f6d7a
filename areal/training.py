"""TrainerClient: what the controller may ask of training, and the options that a recipe gives to its engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from archon.batch import PackedBatch
from archon.engine import Publication
from archon.losses import LossSpec, TokenOutputs
from archon.options import Options
from areal.config import ActorConfig


@runtime_checkable
class TrainerClient(Protocol):
    """One model under training, in this process or in N workers behind the client.

    Batches go in once and columns come back once, on the CPU, in input order. A loss crosses as a LossSpec.
    """

    version: int

    def train_step(self, batch: PackedBatch, loss: LossSpec, *, n_minibatches: int = 1) -> dict[str, float]: ...
    def forward(self, batch: PackedBatch, what: Sequence[str] = ("logprobs",)) -> TokenOutputs: ...
    def publish(self) -> Publication: ...
    def save(self, path: str | Path, kind: Literal["hf", "checkpoint"] = "hf", *, wait: bool = True) -> None: ...
    def saved(self) -> None:
        """Wait for what ``save`` began with ``wait`` False."""
        ...

    def load(self, path: str | Path) -> None: ...
    def digest(self) -> str:
        """Of the fp32 weights."""
        ...

    def health(self) -> dict[str, Any]: ...


def engine_options(actor: ActorConfig) -> Options:
    """How the layout of an actor runs."""
    archon = actor.archon
    own_names = {"reshard_after_forward_policy", "ac_mode", "enable_compile", "use_deterministic_algorithms"}
    return Options(
        **archon.model_dump(exclude=own_names),
        reshard_after_forward=archon.reshard_after_forward_policy,
        ac_mode=archon.ac_mode if actor.gradient_checkpointing else "none",
        compile="inductor" if archon.enable_compile else None,
        deterministic=archon.use_deterministic_algorithms,
    )
