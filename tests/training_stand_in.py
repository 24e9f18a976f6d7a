"""An engine for tests of the processes around it: collectives without a model, and ranks that misbehave on request."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from archon import LossSpec, PackedBatch, phase
from archon.engine import Publication
from archon.losses import TokenOutputs

ENGINE = "training_stand_in:StandIn"
MODEL = Path(__file__).parents[1] / "configs" / "models" / "tiny_qwen3_moe"
TENSORS = 6


def misbehave(what: str) -> None:
    if what == "raise":
        raise ValueError("token 7 is not in the vocabulary")
    if what == "exit":
        os._exit(3)
    if what == "crash":
        ctypes.string_at(0)
    time.sleep(600)


class StandIn:
    """``LossSpec("none", {"rank": r, "what": w})`` makes rank r misbehave while the others wait for it."""

    def __init__(self, path: str, layout: str, device: torch.device, **arguments: Any) -> None:
        self.version = 0
        self.refuse = arguments.get("refuse")
        if self.refuse:
            raise ValueError(f"refuse is {self.refuse!r}")

    def train_step(self, batch: PackedBatch, loss: LossSpec, *, n_minibatches: int = 1) -> dict[str, float]:
        phase.set("forward/backward", 3)
        if loss.config.get("rank") == dist.get_rank():
            misbehave(loss.config["what"])
        total = batch.input_ids.sum()
        with phase.of("reduce"):
            dist.all_reduce(total)
        self.version += 1
        return {"loss": float(total)}

    def forward(self, batch: PackedBatch, what: Sequence[str] = ("logprobs",)) -> TokenOutputs:
        return TokenOutputs(logprobs=batch.input_ids.float() * dist.get_world_size())

    def publish(self) -> Publication:
        return Publication(self.version, self._weights)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(TENSORS):
            value = torch.full((1000,), float(number if dist.get_rank() == 0 else -1))
            dist.broadcast(value, src=0)
            yield f"weight.{TENSORS - number}", value

    def health(self) -> dict[str, Any]:
        return {"version": self.version, "peak_memory_bytes": dist.get_rank()}
