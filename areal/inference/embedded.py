"""Rollout engine inside the training process: transformers' continuous batching on the CPU."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from areal.inference.backend import BackendError, Capabilities, Chunk, DigestMismatch, GenerationRequest
from areal.rollout.trajectory import PROMPT_VERSION

if TYPE_CHECKING:
    from areal.inference.generation_loop import Delivery, GenerationLoop, Running

_DEFAULT_KV_BYTES = 2**28
_LOGITS_PER_STEP = 2**24
_JOIN_TIMEOUT_S = 30.0
_STAGE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _Stage:
    version: int
    digest: str


class EmbeddedBackend:
    """Serves a copy of the trainer's weights from a thread of this process (``areal.inference.backend.Backend``).

    Weights arrive by ``stage`` and ``commit`` only, those of version 0 too; before the first commit nothing is served.
    Chunks are delivered when a request ends or an update or abort cuts it, not token by token.

    Args:
        model_folder: Hugging Face folder; its config gives the architecture and the end-of-sequence ids.
        dtype: of weights, cache and compute; logits are fp32.
        max_model_len: most tokens of prompt and completion; None takes the model's positions.
        kv_cache_tokens: tokens whose keys and values are kept; None takes 256 MiB of them, or ``max_model_len`` tokens
            where that is more. Requests that do not fit are recomputed later.
        num_threads: intra-op threads of the generation thread alone; None leaves torch's default.
        eos_token_ids: end a completion, like a request's ``stop_token_ids``; None takes the folder's.
        seed: of all sampling.
        deterministic: what a request samples is a function of (seed, version, ``order``, prompt) as long as the
            same requests run together, which ``areal.inference.deterministic`` arranges. Prefixes are not shared.
    """

    def __init__(
        self,
        model_folder: str | Path,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        max_model_len: int | None = None,
        kv_cache_tokens: int | None = None,
        num_threads: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        seed: int = 0,
        deterministic: bool = False,
    ) -> None:
        self._folder = Path(model_folder)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._kv_cache_tokens = kv_cache_tokens
        self._num_threads = num_threads
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._deterministic = deterministic
        self._max_model_len = self._read_max_model_len(max_model_len)
        self._stop_ids: frozenset[int] = frozenset()
        self._vocab_size = 0
        self._models: tuple[Any, ...] = ()
        self._loop: GenerationLoop | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        self._requests: dict[str, Running] = {}
        self._inboxes: dict[Running, asyncio.Queue[Delivery]] = {}
        self._rng = random.Random(seed)
        self._repeats: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._pauses = 0
        self._stage: _Stage | None = None
        self._stage_lock = threading.Lock()
        self._digest = ""
        self._unhealthy: BackendError | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            in_place_update=True,
            deterministic=self._deterministic,
            top_k_top_p=True,
            routed_experts=False,
            max_model_len=self._max_model_len,
        )

    @property
    def version(self) -> int:
        return PROMPT_VERSION if self._loop is None else self._loop.version

    @property
    def digest(self) -> str:
        return self._digest

    async def start(self) -> None:
        if self._loop is None:
            self._events = asyncio.get_running_loop()
            self._loop = await asyncio.to_thread(self._build)

    async def stop(self) -> None:
        loop, self._loop = self._loop, None
        self._models, self._stage, self._digest, self._unhealthy, self._pauses = (), None, "", None, 0
        if loop is not None:
            await asyncio.to_thread(loop.stop, _JOIN_TIMEOUT_S)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        loop = self._serving()
        running = self._admit(request)
        inbox: asyncio.Queue[Delivery] = asyncio.Queue()
        self._requests[request.request_id] = running
        self._inboxes[running] = inbox
        added = loop.call(partial(loop.add, running))
        added.add_done_callback(lambda future: self._deliver_failure(running, future.exception()))
        ended = False
        try:
            while not ended:
                item = await inbox.get()
                ended = isinstance(item, BackendError) or item.finish_reason is not None
                if isinstance(item, BackendError):
                    raise BackendError(str(item)) from item.__cause__
                yield item
        finally:
            del self._inboxes[running], self._requests[request.request_id]
            if not ended:
                loop.call(partial(loop.end, [request.request_id]))

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        from areal.inference import serving_model

        loop = self._serving()
        return await asyncio.wrap_future(
            loop.call(lambda: serving_model.score(loop.model, sequences, temperature, loop.max_batch_tokens))
        )

    async def abort(self, request_id: str | None = None) -> None:
        loop = self._running_loop()
        ids = list(self._requests) if request_id is None else [request_id]
        await asyncio.wrap_future(loop.call(partial(loop.end, ids)))

    async def pause(self) -> None:
        loop = self._running_loop()
        loop.hold()
        self._pauses += 1
        try:
            await asyncio.wrap_future(loop.call(lambda: None))
        except BaseException:
            self._pauses -= 1
            loop.release()
            raise

    async def resume(self) -> None:
        if self._pauses == 0:
            raise BackendError("resume() without a pause()")
        self._pauses -= 1
        self._running_loop().release()

    async def stage(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> str:
        self._running_loop()
        self._stage = None
        cancelled = threading.Event()
        try:
            digest = await asyncio.to_thread(self._fill_stage, tensors, cancelled)
        except BaseException:
            # A thread cannot be cancelled: it stops before its next tensor.
            cancelled.set()
            raise
        self._stage = _Stage(version, digest)
        return digest

    async def commit(self, version: int, digest: str) -> None:
        loop = self._running_loop()
        stage, self._stage = self._stage, None
        if stage != _Stage(version, digest):
            raise DigestMismatch(
                f"asked to commit version {version} with digest {digest[:12]}, but the stage holds "
                f"{'nothing' if stage is None else f'version {stage.version} with digest {stage.digest[:12]}'}; "
                f"version {self.version} still serves: stage the weights again"
            )
        await asyncio.wrap_future(loop.call(partial(self._switch, loop, stage)))

    async def unstage(self) -> None:
        self._stage = None

    def metrics(self) -> dict[str, float]:
        loop = self._loop
        if loop is None:
            return {}
        gauges = {
            "running": len(self._requests),
            "waiting": loop.batching.waiting,
            "cache_free_fraction": loop.batching.free_fraction,
            "version": loop.version,
        }
        return {f"inference/{name}": float(value) for name, value in (gauges | loop.counters).items()}

    def _read_max_model_len(self, asked: int | None) -> int:
        from transformers import AutoConfig

        positions = int(AutoConfig.from_pretrained(self._folder).get_text_config().max_position_embeddings)
        if asked is not None and not 1 < asked <= positions:
            raise ValueError(f"max_model_len {asked} is not between 2 and the {positions} positions of {self._folder}")
        return asked or positions

    def _build(self) -> GenerationLoop:
        from areal.inference import serving_model
        from areal.inference.continuous_batching import CacheSize
        from areal.inference.generation_loop import GenerationLoop

        self._models = tuple(serving_model.build_model(self._folder, self._dtype) for _ in range(2))
        config = self._models[0].config
        self._vocab_size = int(config.vocab_size)
        eos = serving_model.stop_token_ids(self._folder) if self._eos_token_ids is None else self._eos_token_ids
        self._stop_ids = frozenset(eos)
        kv_tokens = self._kv_cache_tokens or max(
            self._max_model_len, _DEFAULT_KV_BYTES // serving_model.kv_bytes_per_token(config, self._dtype)
        )
        if kv_tokens < self._max_model_len:
            raise ValueError(
                f"kv_cache_tokens {kv_tokens} holds no sequence of max_model_len {self._max_model_len}: "
                "raise kv_cache_tokens or lower max_model_len"
            )
        size = CacheSize(
            kv_tokens=kv_tokens,
            max_requests=min(max(_LOGITS_PER_STEP // self._vocab_size, 16), 1024),
            share_prefixes=not self._deterministic,
        )
        loop = GenerationLoop(self._models[0], size, self._deliver, self._num_threads)
        loop.start()
        return loop

    def _running_loop(self) -> GenerationLoop:
        if self._loop is None:
            raise BackendError("the embedded engine is not started: call start()")
        if self._loop.failure is not None:
            raise BackendError(str(self._loop.failure)) from self._loop.failure.__cause__
        return self._loop

    def _serving(self) -> GenerationLoop:
        loop = self._running_loop()
        if self._unhealthy is not None:
            raise BackendError(str(self._unhealthy)) from self._unhealthy.__cause__
        if not self._digest:
            raise BackendError("the embedded engine has no weights yet: stage and commit a version first")
        return loop

    def _admit(self, request: GenerationRequest) -> Running:
        from areal.inference.generation_loop import Running

        prompt, name = request.input_ids, f"request {request.request_id}"
        room = self._max_model_len - len(prompt)
        if request.request_id in self._requests:
            raise ValueError(f"{name} is already running: request ids must be unique")
        if not prompt:
            raise ValueError(f"{name} has an empty prompt")
        if room < 1:
            raise ValueError(
                f"{name}: prompt of {len(prompt)} tokens leaves no room in max_model_len {self._max_model_len}"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise ValueError(f"{name} has token ids outside the vocabulary of {self._vocab_size}")
        if request.max_new_tokens < 1 or request.top_k < 0 or not 0.0 < request.top_p <= 1.0:
            raise ValueError(f"{name}: needs max_new_tokens >= 1, top_k >= 0 and 0 < top_p <= 1, got {request}")
        if not 0.0 <= request.temperature < math.inf:
            raise ValueError(f"{name}: temperature {request.temperature} is not a finite number >= 0")
        return Running(
            request=request,
            budget=min(request.max_new_tokens, room),
            stop_ids=self._stop_ids | frozenset(request.stop_token_ids),
            rng=self._random_numbers(request),
        )

    def _random_numbers(self, request: GenerationRequest) -> random.Random:
        if not self._deterministic:
            return random.Random(self._rng.getrandbits(64))
        if not request.order:
            raise ValueError(
                f"request {request.request_id} has no order, which deterministic sampling is a function of"
            )
        key = (self.version, request.order)
        self._repeats[key] += 1
        return random.Random(f"{self._seed} {key} {self._repeats[key]}")

    def _deliver(self, items: list[tuple[Running, Delivery]]) -> None:
        """Called in the generation thread; one wake-up of the event loop for all."""
        events = self._events
        if items and events is not None and not events.is_closed():
            events.call_soon_threadsafe(self._put, items)

    def _deliver_failure(self, running: Running, error: BaseException | None) -> None:
        if error is not None:
            failure = error if isinstance(error, BackendError) else BackendError(f"{type(error).__name__}: {error}")
            self._deliver([(running, failure)])

    def _put(self, items: list[tuple[Running, Delivery]]) -> None:
        for running, item in items:
            if running in self._inboxes:
                self._inboxes[running].put_nowait(item)

    def _fill_stage(self, tensors: Iterable[tuple[str, Tensor]], cancelled: threading.Event) -> str:
        """Copy into the model that does not serve; runs in a worker thread."""
        from archon.weights import Digest, load_named

        if not self._stage_lock.acquire(timeout=_STAGE_TIMEOUT_S):
            raise BackendError(f"waited {_STAGE_TIMEOUT_S} s for a cancelled stage to give up its tensors")
        try:
            arrived = Digest()

            def received() -> Iterator[tuple[str, Tensor]]:
                for name, tensor in tensors:
                    if cancelled.is_set():
                        raise BackendError("the stage was cancelled")
                    arrived.update(name, tensor)
                    yield name, tensor

            load_named(self._spare(), received())
            return arrived.hexdigest()
        finally:
            self._stage_lock.release()

    def _spare(self) -> Any:
        loop = self._running_loop()
        return next(model for model in self._models if model is not loop.model)

    def _switch(self, loop: GenerationLoop, stage: _Stage) -> None:
        """Runs in the generation thread, so between two steps."""
        try:
            loop.switch(self._spare(), stage.version)
        except Exception as error:
            self._digest = ""
            self._unhealthy = BackendError(
                f"the switch to version {stage.version} failed half-way ({type(error).__name__}: {error}); "
                "stage and commit weights again"
            )
            loop.fail_all(self._unhealthy)
            raise self._unhealthy from error
        self._digest, self._unhealthy = stage.digest, None
        self._repeats.clear()
