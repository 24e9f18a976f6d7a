"""The thread that generates: one step of continuous batching at a time, commands between steps."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from areal.inference.backend import BackendError, Chunk, GenerationRequest
from areal.inference.continuous_batching import CacheSize, ContinuousBatching
from areal.inference.sampling import sample
from areal.rollout.trajectory import PROMPT_VERSION, FinishReason

R = TypeVar("R")
Delivery = Chunk | BackendError


@dataclass(eq=False)
class Running:
    """A request in the engine: what it has sampled, and how much of that was delivered."""

    request: GenerationRequest
    budget: int
    """Most tokens it may sample."""
    stop_ids: frozenset[int]
    rng: random.Random
    """Its own random numbers: what it draws does not depend on what else runs."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    delivered: int = 0

    def cut(self, version: int, reason: FinishReason | None = None) -> Chunk:
        """The tokens since the last chunk; all are of one version."""
        chunk = Chunk(self.tokens[self.delivered :], self.logprobs[self.delivered :], version, reason)
        self.delivered = len(self.tokens)
        return chunk

    def finish(self, version: int) -> Chunk:
        return self.cut(version, "stop" if self.tokens[-1] in self.stop_ids else "length")


class GenerationLoop:
    """Generates in a thread of its own; ``call`` runs a function there, between two steps.

    The model, the scheduler and ``running`` are touched in that thread only, so nothing but the queue of commands is
    locked.

    Args:
        model: gives shapes; the first ``switch`` brings the one that serves.
        deliver: called in the generation thread with what the requests get.
        num_threads: intra-op threads of the generation thread alone; None leaves torch's default.
    """

    def __init__(
        self,
        model: nn.Module,
        cache_size: CacheSize,
        deliver: Callable[[list[tuple[Running, Delivery]]], None],
        num_threads: int | None,
    ) -> None:
        self.model = model
        self.version = PROMPT_VERSION
        self.running: dict[str, Running] = {}
        self.failure: BackendError | None = None
        self.counters = {"steps": 0.0, "generated_tokens": 0.0, "finished": 0.0, "aborted": 0.0, "busy_seconds": 0.0}
        self.batching = ContinuousBatching(model, cache_size, self._sample)
        self._deliver = deliver
        self.max_batch_tokens = cache_size.max_batch_tokens
        self._num_threads = num_threads
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._holds = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    # From any thread.

    def start(self) -> None:
        default_threads = torch.get_num_threads()
        self._thread.start()
        self.call(lambda: None).result()
        # A thread that sets its own number also sets what threads started later inherit.
        torch.set_num_threads(default_threads)

    def call(self, function: Callable[[], R]) -> Future[R]:
        """Run ``function`` in the generation thread after the running step."""
        future: Future[R] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(self.failure or _stopped())
            else:
                self._commands.append((future, function))
                self._wake.notify()
        return future

    def hold(self) -> None:
        """No further step begins until every hold is released; commands still run."""
        with self._wake:
            self._holds += 1

    def release(self) -> None:
        with self._wake:
            self._holds -= 1
            self._wake.notify()

    def stop(self, timeout_s: float) -> None:
        """End all requests with reason ``abort`` and join the thread. Idempotent.

        Raises:
            BackendError: the thread did not end in time.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise BackendError(
                f"waited {timeout_s} s for the generation thread to leave step {self.counters['steps']:.0f}"
            )

    # In the generation thread.

    def add(self, running: Running) -> None:
        self._schedule(running)
        self.running[running.request.request_id] = running

    def end(self, request_ids: Iterable[str]) -> None:
        """End requests with what they have and reason ``abort``; ids that do not run ended by themselves."""
        ended = [running for request_id in request_ids if (running := self.running.pop(request_id, None)) is not None]
        self.batching.cancel([running.request.request_id for running in ended])
        self.counters["aborted"] += len(ended)
        self._deliver([(running, running.cut(self.version, "abort")) for running in ended])

    def switch(self, model: nn.Module, version: int) -> None:
        """Serve ``model`` from the next step on: deliver what the old one sampled, forget its keys and values, and
        continue every request from its prompt and partial tokens."""
        partial = [running for running in self.running.values() if len(running.tokens) > running.delivered]
        self._deliver([(running, running.cut(self.version)) for running in partial])
        self.batching.clear()
        self.model, self.version = model, version
        for running in self.running.values():
            self._schedule(running)

    def fail_all(self, failure: BackendError) -> None:
        """End all requests with an error; the next ``switch`` clears the scheduler of them."""
        failed = [(running, failure) for running in self.running.values()]
        self.running.clear()
        self._deliver([*failed])

    def _schedule(self, running: Running) -> None:
        self.batching.add(
            running.request.request_id,
            [*running.request.input_ids, *running.tokens],
            running.budget - len(running.tokens),
            sorted(running.stop_ids),
        )

    def _run(self) -> None:
        failure = None
        try:
            if self._num_threads is not None:
                # A thread takes the default when it first asks, which must not come after its own number.
                torch.get_num_threads()
                torch.set_num_threads(self._num_threads)
            while self._run_commands():
                started = time.perf_counter()
                self._step()
                self.counters["busy_seconds"] += time.perf_counter() - started
        except BaseException as error:
            step = int(self.counters["steps"])
            failure = BackendError(f"the generation thread failed in step {step}: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._close(failure)

    def _run_commands(self) -> bool:
        """Run what is queued, and wait until there is a step to run; False when it is time to stop."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._commands or (self.running and not self._holds))
                if self._stopping:
                    return False
                if not self._commands:
                    return True
                commands, self._commands = self._commands, deque()
            for future, function in commands:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function())
                    except Exception as error:
                        future.set_exception(error)

    def _step(self) -> None:
        finished = [self.running.pop(request_id) for request_id in self.batching.step(self.model)]
        self.counters["steps"] += 1
        self.counters["finished"] += len(finished)
        self._deliver([(running, running.finish(self.version)) for running in finished])

    def _sample(self, request_ids: list[str], logits: Tensor) -> Tensor:
        rows = [self.running[request_id] for request_id in request_ids]
        tokens, logprobs = sample(logits, [row.request for row in rows], [row.rng.random() for row in rows])
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
        self.counters["generated_tokens"] += len(rows)
        return tokens

    def _close(self, failure: BackendError | None) -> None:
        with self._wake:
            self._stopping, self.failure = True, failure
            commands, self._commands = self._commands, deque()
        for future, _ in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure or _stopped())
        last = [(running, failure or running.cut(self.version, "abort")) for running in self.running.values()]
        self.running.clear()
        self._deliver(last)


def _stopped() -> BackendError:
    return BackendError("the embedded engine is stopped; call start() and commit weights to use it again")
