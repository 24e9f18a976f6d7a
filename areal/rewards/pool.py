"""RewardPool: reward functions in worker processes, each call with a deadline that holds whatever the function does."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import subprocess
import traceback
from collections import Counter, OrderedDict, deque
from typing import Any

from areal.rewards import worker
from areal.rewards.functions import (
    RewardError,
    RewardFunction,
    RewardTimeout,
    RewardWorkerDied,
    as_score,
    dump_function,
    import_function,
    is_coroutine_function,
    name_of,
)
from areal.rewards.handle import Call, Function, Handle

log = logging.getLogger(__name__)

MAX_AHEAD = 32
"""Most calls sent to a worker before it answers."""
SECONDS_AHEAD = 0.01
"""Work sent to a worker ahead, by the measured time of its functions; an unmeasured function counts as all of it."""
MAX_FUNCTIONS = 64


class NeedsLoop(Exception):
    """A worker found that the function at an import path is a coroutine function."""


class RewardPool:
    """Runs reward functions in ``workers`` processes, started when first needed and kept.

    Args:
        workers: processes; each runs one call at a time.
        timeout: seconds a call may run. A worker that runs longer is killed, alone, and replaced.
        start_timeout: seconds a worker may take to start, and to import the module of a function.

    A function is an import path, a callable, or a coroutine function. Importable ones travel by name, others by value
    (as they are when first called). A coroutine function runs on the calling loop, where only its awaits can be
    interrupted. A pool belongs to the asyncio loop that first calls it.
    """

    def __init__(self, workers: int = 2, timeout: float = 15.0, start_timeout: float = 60.0) -> None:
        if workers < 1 or timeout <= 0 or start_timeout <= 0:
            raise ValueError(
                f"a pool needs workers >= 1 and positive timeouts, got {workers}, {timeout}, {start_timeout}"
            )
        self.workers = workers
        self.timeout = timeout
        self.start_timeout = start_timeout
        self._handles: list[Handle] = []
        self._pending: deque[Call] = deque()
        self._functions: OrderedDict[RewardFunction | str, Function] = OrderedDict()
        self._coroutines: dict[str, RewardFunction] = {}
        self._counts: Counter[str] = Counter()
        self._ids = itertools.count(1)
        self._killed: list[subprocess.Popen[bytes]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def call(self, function: RewardFunction | str, /, *arguments: Any, **named: Any) -> float:
        """The score that ``function(*arguments, **named)`` returns.

        Raises:
            RewardTimeout: it ran longer than ``timeout`` seconds.
            RewardWorkerDied: its process ended under it.
            RewardError: it raised (the traceback is in the message), returned no finite number, cannot be found, or
                its arguments cannot be sent; or the pool closed meanwhile.
        """
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if loop is not self._loop:
            raise RuntimeError("this RewardPool serves another asyncio loop; make one pool per loop")
        if self._closed:
            raise RewardError("the reward pool is closed")
        self._counts["calls"] += 1
        if isinstance(function, str):
            if function not in self._coroutines:
                try:
                    return await self._submit(loop, function, arguments, named)
                except NeedsLoop:
                    self._coroutines[function] = import_function(function)
            return await self._run_here(self._coroutines[function], arguments, named)
        if is_coroutine_function(function):
            return await self._run_here(function, arguments, named)
        return await self._submit(loop, function, arguments, named)

    def metrics(self) -> dict[str, float]:
        """Counters since the pool was made: calls, errors (all kinds), timeouts, worker_deaths."""
        return {f"reward/{name}": self._counts[name] for name in ("calls", "errors", "timeouts", "worker_deaths")}

    async def close(self, deadline: float = 5.0) -> None:
        """Kill the workers and fail what is in flight, within ``deadline`` seconds. Idempotent."""
        self._closed = True
        handles, self._handles = self._handles, []
        calls = [*self._pending, *(call for handle in handles for call in handle.calls)]
        self._pending.clear()
        for handle in handles:
            self._end(handle)
        for call in calls:
            self._fail(call, RewardError(f"the reward pool closed while {call.function.name} was in flight"))
        end = asyncio.get_running_loop().time() + deadline
        while alive := [process.pid for process in self._killed if process.poll() is None]:
            if asyncio.get_running_loop().time() > end:
                log.warning("reward workers %s still end %.0f s after SIGKILL; not waiting for them", alive, deadline)
                return
            await asyncio.sleep(0.005)

    async def _submit(
        self, loop: asyncio.AbstractEventLoop, function: RewardFunction | str, arguments: Any, named: Any
    ) -> float:
        try:
            entry = self._function(function)
            packed = pickle.dumps((arguments, named), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickling runs the code of whatever is pickled
            self._counts["errors"] += 1
            raise RewardError(f"{name_of(function)} or its arguments cannot be sent to a worker: {error}") from error
        call = Call(next(self._ids), entry, packed, loop.create_future())
        self._pending.append(call)
        self.available()
        return await call.result

    async def _run_here(self, function: RewardFunction, arguments: Any, named: Any) -> float:
        name = name_of(function)
        try:
            async with asyncio.timeout(self.timeout) as scope:
                return as_score(await function(*arguments, **named), name)
        except Exception as error:
            self._counts["errors"] += 1
            if isinstance(error, RewardError):
                raise
            if scope.expired():
                self._counts["timeouts"] += 1
                raise RewardTimeout(f"reward function {name} ran longer than {self.timeout:g} s") from error
            raise RewardError(f"reward function {name} raised\n{traceback.format_exc()}") from error

    def _function(self, function: RewardFunction | str) -> Function:
        """The function as it travels; the latest are kept, so that a notebook's is copied once and not per call."""
        try:
            known = self._functions.get(function)
        except TypeError:  # an unhashable callable object
            return Function(name_of(function), dump_function(function))
        if known is None:
            known = self._functions[function] = Function(name_of(function), dump_function(function))
        self._functions.move_to_end(function)
        if len(self._functions) > MAX_FUNCTIONS:
            self._functions.popitem(last=False)
        return known

    def available(self) -> None:
        """Give pending calls to workers with room, and start workers while there is more to do than they can take."""
        if self._closed:
            return
        for handle in self._handles:
            if handle.accepts and (batch := self._batch(handle)):
                handle.send(batch)
        starting = sum(handle.phase == "start" for handle in self._handles)
        for _ in range(min(self.workers - len(self._handles), len(self._pending) - starting)):
            assert self._loop is not None
            self._killed = [process for process in self._killed if process.poll() is None]
            self._handles.append(Handle(self, self._loop))

    def _batch(self, handle: Handle) -> list[Call]:
        """Pending calls to send to a worker: enough to keep it busy while the loop is, and its fair share at most."""
        seconds = sum(_estimate(call) for call in handle.calls)
        if seconds > SECONDS_AHEAD / 2 or len(handle.calls) > MAX_AHEAD // 2:
            return []
        share = -(-len(self._pending) // self.workers)
        batch: list[Call] = []
        while self._pending and len(batch) < min(share, MAX_AHEAD - len(handle.calls)):
            if self._pending[0].result.done():  # its caller was cancelled
                self._pending.popleft()
                continue
            seconds += _estimate(self._pending[0])
            if seconds > SECONDS_AHEAD and (batch or handle.calls):
                break
            batch.append(self._pending.popleft())
        return batch

    def answered(self, call: Call, kind: int, value: Any, seconds: float) -> None:
        known = call.function.seconds
        call.function.seconds = seconds if known is None else 0.8 * known + 0.2 * seconds
        if kind == worker.SCORE:
            if not call.result.done():
                call.result.set_result(value)
        else:
            self._fail(call, NeedsLoop() if kind == worker.COROUTINE else RewardError(value))

    def returned(self, calls: list[Call]) -> None:
        self._pending.extendleft(reversed(calls))
        self.available()

    def expired(self, handle: Handle, seconds: float) -> None:
        phase = handle.phase
        if phase == "run":
            self._counts["timeouts"] += 1
            name = handle.calls[0].function.name
            error: RewardError = RewardTimeout(
                f"reward function {name} ran longer than {self.timeout:g} s and its worker was killed; "
                "other rewards are not affected"
            )
        elif phase == "load":
            name = handle.calls[0].function.name
            error = RewardTimeout(f"importing reward function {name} took longer than {self.start_timeout:g} s")
        else:
            error = RewardWorkerDied(f"a reward worker did not {phase} within {seconds:.0f} s")
        self._replace(handle, error)

    def lost(self, handle: Handle) -> None:
        if handle not in self._handles:
            return  # killed by us
        reason = handle.exit_reason()
        self._counts["worker_deaths"] += 1
        doing = f"while running {handle.calls[0].function.name}" if handle.calls else f"in phase {handle.phase}"
        message = f"reward worker {handle.process.pid} ended by {reason} {doing}"
        log.warning("%s; it is replaced", message)
        self._replace(handle, RewardWorkerDied(message))

    def _replace(self, handle: Handle, error: RewardError) -> None:
        """Drop a worker: its running call fails and the rest wait for others; one that never started fails all."""
        self._handles.remove(handle)
        self._end(handle)
        failed = list(self._pending) if handle.phase == "start" else list(handle.calls)[:1]
        for call in failed:
            self._fail(call, error)
        if handle.phase == "start":
            self._pending.clear()
        self.returned(list(handle.calls)[1:])

    def _end(self, handle: Handle) -> None:
        handle.kill()
        self._killed.append(handle.process)

    def _fail(self, call: Call, error: Exception) -> None:
        if not call.result.done():
            self._counts["errors"] += not isinstance(error, NeedsLoop)
            call.result.set_exception(error)


def _estimate(call: Call) -> float:
    return SECONDS_AHEAD if call.function.seconds is None else call.function.seconds
