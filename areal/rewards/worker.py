"""A reward worker: a fresh interpreter that reads calls from a socket, runs them one by one, and writes the scores.

It imports nothing but the standard library and what the reward functions themselves import.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any

from areal.rewards.functions import RewardError, RewardFunction, as_score, is_coroutine_function, load_function

READY, LOADING, LOADED, SCORE, FAILURE, COROUTINE, DROPPED = range(7)
"""First field of a message from the worker; then the id of the call, the score or failure, and the seconds it took."""
RUN, DROP = range(2)
"""First field of a message to the worker: RUN with calls ``(id, name, function, arguments)``, or DROP with the id of
the one call to keep, which a worker that was slow to start may not have begun."""

HEADER = struct.Struct("!I")
FUNCTION_CACHE = 64


def encode(message: tuple[Any, ...]) -> bytes:
    """A message as one frame: length, then pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


class Frames:
    """Turns a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Any, ...]]:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = pickle.loads(memoryview(self._buffer)[HEADER.size : end].tobytes())
            del self._buffer[:end]
            yield message


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, so that even kill -9 leaves no orphan.

    Elsewhere than on Linux an idle worker ends when the socket closes, and a busy one after its call.
    """
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


class Worker:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._calls: deque[tuple[int, str, bytes, bytes]] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._functions: dict[bytes, RewardFunction] = {}
        self._started = 0.0

    def serve(self) -> None:
        """Run calls until the other end closes."""
        self._send(READY, 0)
        while True:
            while not self._calls or self._poll.poll(0):
                data = self._connection.recv(1 << 18)
                if not data:
                    return
                for message in self._frames.feed(data):
                    self._receive(message)
            call, name, blob, arguments = self._calls.popleft()
            self._started = time.perf_counter()
            kind, value = self._run(call, name, blob, arguments)
            self._send(kind, call, value, time.perf_counter() - self._started)

    def _receive(self, message: tuple[Any, ...]) -> None:
        if message[0] == RUN:
            self._calls.extend(message[1])
        else:
            self._calls = deque(call for call in self._calls if call[0] == message[1])
            self._send(DROPPED, 0)

    def _run(self, call: int, name: str, blob: bytes, arguments: bytes) -> tuple[int, Any]:
        """The kind of answer to a call, and its value: a score or the text of a failure."""
        try:
            function = self._function(call, blob)
            if is_coroutine_function(function):
                return COROUTINE, None
            positional, named = pickle.loads(arguments)
            return SCORE, as_score(function(*positional, **named), name)
        except RewardError as error:
            return FAILURE, str(error)
        except BaseException:  # a reward may raise anything, SystemExit included: the caller gets it as text
            return FAILURE, f"reward function {name} raised\n{traceback.format_exc()}"

    def _function(self, call: int, blob: bytes) -> RewardFunction:
        """Load a function once, saying so before and after: an import has its own deadline."""
        if blob not in self._functions:
            self._send(LOADING, call)
            function = load_function(blob)
            self._send(LOADED, call)
            if len(self._functions) == FUNCTION_CACHE:
                del self._functions[next(iter(self._functions))]
            self._functions[blob] = function
            self._started = time.perf_counter()
        return self._functions[blob]

    def _send(self, kind: int, call: int, value: Any = None, seconds: float = 0.0) -> None:
        self._connection.sendall(encode((kind, call, value, seconds)))


def main(descriptor: int, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when workers end
    die_with_parent(parent)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the pool closed while a score was on its way
        Worker(socket.socket(fileno=descriptor)).serve()
