"""The protocol that every rollout engine implements, and what passes over it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from areal.rollout.trajectory import FinishReason


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to continue, in tokens.

    ``order`` is the place of the request among those of one run (prompt position, sample, turn): deterministic
    sampling admits by it, and nothing else reads it.
    """

    request_id: str
    input_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """Tokens sampled by one version of the weights.

    ``logprobs`` are of the sampled tokens under the full distribution at the sampling temperature, before any top-p or
    top-k. Exactly one chunk of a request, the last, has a finish reason; a chunk may have no token.
    """

    token_ids: list[int]
    logprobs: list[float]
    version: int
    finish_reason: FinishReason | None = None
    routed_experts: Tensor | None = None


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; an unsupported combination is refused at start."""

    in_place_update: bool
    """Running requests survive a weight update and go on under the new version."""
    deterministic: bool
    """Sampling can be made a function of (seed, prompt, sample, version)."""
    top_k_top_p: bool
    routed_experts: bool
    max_model_len: int


class BackendError(RuntimeError):
    """The engine is not able to serve; the message says what happened and when."""


class DigestMismatch(BackendError):
    """The staged weights are not those the trainer published; the old version still serves."""


@runtime_checkable
class Backend(Protocol):
    """A rollout engine. All methods are called from one asyncio loop.

    Weight update: ``stage`` while generating, outside the serving weights; ``commit`` switches in one pause and only if
    the digest of what arrived equals the given one; ``unstage`` drops a stage. A failure inside ``commit`` marks the
    engine unhealthy: it refuses to serve until weights are staged and committed in full again.
    """

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str:
        """Digest (``archon.weights.digest``) of the weights that serve."""
        ...

    async def start(self) -> None: ...
    async def stop(self) -> None:
        """End all requests with reason ``abort`` and free the engine. Idempotent."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Sample a continuation.

        Raises:
            ValueError: the prompt leaves no room for a token in ``max_model_len``.
            BackendError: the engine failed or is unhealthy.
        """
        ...

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of every token given those before it; 0 for the first token of a sequence."""
        ...

    async def abort(self, request_id: str | None = None) -> None:
        """End one request, or all, with what was generated and finish reason ``abort``."""
        ...

    async def pause(self) -> None:
        """Stop sampling after the current engine step; requests wait. Pauses nest."""
        ...

    async def resume(self) -> None: ...
    async def stage(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Take weights under Hugging Face disk names into host memory; returns the digest of what arrived."""
        ...

    async def commit(self, version: int, digest: str) -> None:
        """Switch to the staged version.

        Raises:
            DigestMismatch: the stage holds another version or digest; it is dropped and the old version serves.
            BackendError: the switch failed half-way; the engine is unhealthy.
        """
        ...

    async def unstage(self) -> None: ...
    def metrics(self) -> dict[str, float]:
        """Slash-named gauges and counters, such as ``inference/running`` and ``inference/generated_tokens``."""
        ...
