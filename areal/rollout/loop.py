"""An asyncio loop in a daemon thread, which a synchronous training loop can call into."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs from construction to `stop`.

    Attributes:
        loop: the loop; other threads reach it through `call` and `run` alone.
        on_crash: called on the loop's thread with the exception that ended the loop, if one does.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.on_crash: Callable[[BaseException], None] | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        except BaseException as error:  # SystemExit in a task ends the loop: whoever waits has to know
            if self.on_crash is None:
                raise
            self.on_crash(error)
        finally:
            self.loop.close()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop call a function soon; nothing happens once the loop has ended."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Run a coroutine on the loop and wait for its result, from any other thread.

        Raises:
            TimeoutError: it did not end within ``timeout`` seconds; it is cancelled. Says ``what`` was waited for.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(f"{what}: the loop cannot wait for itself; await the coroutine instead")
        if not self.alive or self.loop.is_closed():
            coroutine.close()
            raise RuntimeError(f"{what}: the thread {self._thread.name!r} has ended")
        began = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(
                f"waited {time.monotonic() - began:.1f} s for {what}; the loop is at\n{self.stack()}"
            ) from None

    def stop(self, timeout: float) -> None:
        """Cancel what still runs, end the loop and join its thread.

        Raises:
            TimeoutError: the thread did not end, with its stack: something blocks the loop.
        """
        if self.alive:
            self.call(self._drain)
            self._thread.join(timeout)
            if self.alive:
                raise TimeoutError(
                    f"thread {self._thread.name!r} did not end within {timeout} s; it is at\n{self.stack()}"
                )

    def _drain(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()

        async def finish() -> None:
            if tasks:
                await asyncio.wait(tasks, timeout=1)
            await self.loop.shutdown_asyncgens()
            await self.loop.shutdown_default_executor()
            self.loop.stop()

        self.loop.create_task(finish())

    def stack(self) -> str:
        """Where the thread is now."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "(ended)"
