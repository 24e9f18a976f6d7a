"""What crosses between the controller and its training workers: JSON and safetensors over a stream socket.

A message is ``<header bytes: u32> <payload bytes: u64> <header: JSON> <payload: safetensors or nothing>``, big endian.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from archon.batch import PackedBatch

_PREFIX = struct.Struct("!IQ")


@dataclass(frozen=True)
class Message:
    header: dict[str, Any]
    payload: memoryview

    def tensors(self) -> dict[str, Tensor]:
        return decode(bytes(self.payload)) if self.payload else {}


class Channel:
    """Messages over a connected stream socket, whole ones only."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._sizes: tuple[int, int] | None = None
        self._expect(_PREFIX.size)

    def send(self, header: Mapping[str, Any], payload: bytes = b"", *, seconds: float | None = None) -> None:
        """Send one message; ``seconds`` None waits as long as it takes.

        Raises:
            TypeError: the header is no JSON; nothing was sent.
            TimeoutError: the other end did not take it in time; the channel is of no use after that.
            OSError: the other end has gone.
        """
        text = json.dumps(header).encode()
        self.connection.settimeout(seconds)
        try:
            self.connection.sendall(_PREFIX.pack(len(text), len(payload)) + text)
            if payload:
                self.connection.sendall(payload)
        finally:
            self.connection.settimeout(None)

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            EOFError: the other end has gone.
        """
        while (message := self._read(0)) is None:
            pass
        return message

    def arrived(self) -> Message | None:
        """The next message if it is here in full, without waiting; else EOFError or None."""
        return self._read(socket.MSG_DONTWAIT)

    def _read(self, flags: int) -> Message | None:
        while True:
            if self._filled == len(self._buffer):
                if (message := self._advance()) is not None:
                    return message
                continue
            try:
                count = self.connection.recv_into(memoryview(self._buffer)[self._filled :], 0, flags)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                count = 0
            if count == 0:
                raise EOFError("the other end of the channel has gone")
            self._filled += count

    def _advance(self) -> Message | None:
        """Take what was read: a prefix, which says how much is to come, or the message after it."""
        if self._sizes is None:
            self._sizes = _PREFIX.unpack(self._buffer)
            self._expect(sum(self._sizes))
            return None
        body, header_bytes = memoryview(self._buffer), self._sizes[0]
        self._sizes = None
        self._expect(_PREFIX.size)
        return Message(json.loads(bytes(body[:header_bytes])), body[header_bytes:])

    def _expect(self, count: int) -> None:
        self._buffer, self._filled = bytearray(count), 0


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors, wherever they are and whatever they share, as safetensors."""
    storages: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
            tensor = tensor.clone()  # safetensors refuses views and tensors that share memory
        storages.add(tensor.untyped_storage().data_ptr())
        plain[name] = tensor
    return save(plain)


def decode(payload: bytes) -> dict[str, Tensor]:
    return load(payload)


def encode_batch(batch: PackedBatch) -> bytes:
    tensors = {"input_ids": batch.input_ids, "cu_seqlens": batch.cu_seqlens}
    for kind in ("tokens", "sequences"):
        tensors |= {f"{kind}/{name}": column for name, column in getattr(batch, kind).items()}
    return encode(tensors)


def decode_batch(payload: bytes) -> PackedBatch:
    tensors = decode(payload)
    columns: dict[str, dict[str, Tensor]] = {"tokens": {}, "sequences": {}}
    input_ids, cu_seqlens = tensors.pop("input_ids"), tensors.pop("cu_seqlens")
    for path, column in tensors.items():
        kind, _, name = path.partition("/")
        columns[kind][name] = column
    return PackedBatch(input_ids, cu_seqlens, columns["tokens"], columns["sequences"])


def buckets(named: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Group a stream of tensors, in its order, into buckets of at most ``limit`` bytes; a larger tensor has its own.

    Buckets of 16 MB cross twice as fast as those of 64: the C library gives larger blocks back to the system, and each
    page of the next one costs a fault.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket
