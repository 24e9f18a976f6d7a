"""Waves: requests enter the engine together, so that which ones share a step does not depend on timing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from areal.inference.backend import Backend, Capabilities, Chunk, GenerationRequest


@dataclass(eq=False)
class _Held:
    request: GenerationRequest
    entered: asyncio.Future[tuple[AsyncIterator[Chunk], asyncio.Future[Chunk]] | None]
    """The engine's chunks and the first of them on its way, or None when the request was aborted while held."""


class DeterministicWaves:
    """A backend (``areal.inference.backend.Backend``) that holds requests until every live episode waits for it.

    Then all held requests enter the paused engine in the order of ``request.order``. The engine draws every request's
    random numbers from (seed, version, order); with the waves the requests that share a forward are fixed too, so
    tokens and log-probs are bit-equal from run to run. An episode has at most one request at a time.

    Raises:
        ValueError: the engine cannot sample deterministically.
    """

    def __init__(self, backend: Backend) -> None:
        if not backend.capabilities.deterministic:
            raise ValueError(
                f"{type(backend).__name__} cannot sample deterministically: use the embedded engine with "
                "deterministic=True, or set rollout.deterministic_sampling=false"
            )
        self._backend = backend
        self._held: list[_Held] = []
        self._live = 0
        self._release: asyncio.Task[None] | None = None

    def set_live(self, count: int) -> None:
        """Say how many episodes run; called in the event loop after every admission and every end of an episode."""
        self._live = count
        asyncio.get_running_loop().call_soon(self._consider)

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    @property
    def version(self) -> int:
        return self._backend.version

    @property
    def digest(self) -> str:
        return self._backend.digest

    async def start(self) -> None:
        await self._backend.start()

    async def stop(self) -> None:
        self._drop(self._held)
        await self._backend.stop()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        events = asyncio.get_running_loop()
        held = _Held(request, events.create_future())
        self._held.append(held)
        events.call_soon(self._consider)
        try:
            entered = await held.entered
        except asyncio.CancelledError:
            if not held.entered.cancelled() and (lost := held.entered.result()) is not None:
                await _close(*lost)
            raise
        finally:
            if held in self._held:
                self._held.remove(held)
        if entered is None:
            yield Chunk([], [], self.version, "abort")
            return
        chunks, first = entered
        try:
            yield await first
            async for chunk in chunks:
                yield chunk
        finally:
            await _close(chunks, first)

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        return await self._backend.score(sequences, temperature)

    async def abort(self, request_id: str | None = None) -> None:
        self._drop(held for held in self._held if request_id in (None, held.request.request_id))
        await self._backend.abort(request_id)

    async def pause(self) -> None:
        await self._backend.pause()

    async def resume(self) -> None:
        await self._backend.resume()

    async def stage(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> str:
        return await self._backend.stage(version, tensors)

    async def commit(self, version: int, digest: str) -> None:
        await self._backend.commit(version, digest)

    async def unstage(self) -> None:
        await self._backend.unstage()

    def metrics(self) -> dict[str, float]:
        return self._backend.metrics() | {"inference/held": float(len(self._held))}

    def _consider(self) -> None:
        """Start a wave when all live episodes wait; deferred calls let a burst of admissions or ends finish first."""
        if self._held and len(self._held) >= self._live and self._release is None:
            self._release = asyncio.get_running_loop().create_task(self._run_wave())

    async def _run_wave(self) -> None:
        try:
            await self._backend.pause()
        except Exception as error:
            for held in self._take():
                held.entered.set_exception(error)
        else:
            try:
                for held in sorted(self._take(), key=lambda held: held.request.order):
                    chunks = self._backend.generate(held.request)
                    held.entered.set_result((chunks, asyncio.ensure_future(anext(chunks))))
                # The engine takes a request in the first step of its generator.
                await asyncio.sleep(0)
            finally:
                await self._backend.resume()
        finally:
            self._release = None
            self._consider()

    def _take(self) -> list[_Held]:
        taken, self._held = self._held, []
        return [held for held in taken if not held.entered.done()]

    def _drop(self, dropped: Iterable[_Held]) -> None:
        for held in list(dropped):
            if not held.entered.done():
                held.entered.set_result(None)


async def _close(chunks: AsyncIterator[Chunk], first: asyncio.Future[Chunk]) -> None:
    """End the engine's generator whatever state it is in, so that it cancels the request."""
    if not first.cancel() and not first.cancelled():
        first.exception()
    await asyncio.wait([first])
    await chunks.aclose()  # type: ignore[attr-defined]
