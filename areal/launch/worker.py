"""One rank of the training: ``python -m areal.launch.worker DESCRIPTOR STACK_FILE``, started by ``areal.launch.local``.

It reads calls from the socket it inherits and makes them on its engine, as all ranks do together. A batch arrives at
rank 0 alone, which broadcasts it; rank 0 alone answers with results. A call that raises is reported, and the process
stays: its peers, which may wait for it inside a collective, are looked at before the controller ends them all.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pkgutil
import select
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from archon import phase
from archon.device import collectives_backends, own_device
from archon.losses import LossSpec
from archon.optim import OptimizerConfig
from archon.options import Options
from areal.launch.wire import Channel, Message, buckets, decode_batch, encode

_Answer = tuple[dict[str, Any], bytes]


class Worker:
    """The engine of one rank, and the calls it answers."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def serve(self) -> None:
        """Build the engine that the first message asks for, then answer calls until ``close``."""
        start = self._channel.receive().header
        device = own_device(start["device"])
        dist.init_process_group(
            collectives_backends(device),
            store=dist.FileStore(start["rendezvous"], self.world_size),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=start["deadline"] + 60),  # the controller notices first and knows more
        )
        phase.set("build")
        self._bucket_bytes = start["bucket_bytes"]
        self.engine = _build(start["engine"], start["arguments"], device)
        self._answer({})
        while True:
            phase.set("idle")
            message = self._channel.receive()
            if (call := message.header["call"]) == "close":
                break
            phase.set(call)
            self._answer(*getattr(self, f"_{call}")(message))
        dist.destroy_process_group()

    def _answer(self, result: dict[str, Any], payload: bytes = b"") -> None:
        self._channel.send({"version": self.engine.version, **result}, payload)

    def _payload(self, message: Message) -> bytes:
        """The payload of a call on every rank; the controller gave it to rank 0, and its size to all."""
        if self.world_size == 1:
            return bytes(message.payload)
        if self.rank == 0:
            content = torch.frombuffer(message.payload, dtype=torch.uint8)
        else:
            content = torch.empty(message.header["payload_bytes"], dtype=torch.uint8)
        with phase.of("broadcast batch"):
            dist.broadcast(content, src=0)
        return content.numpy().tobytes()

    def _train_step(self, message: Message) -> _Answer:
        batch, header = decode_batch(self._payload(message)), message.header
        metrics = self.engine.train_step(batch, LossSpec(**header["loss"]), n_minibatches=header["n_minibatches"])
        return {"metrics": {name: float(value) for name, value in metrics.items()}}, b""

    def _forward(self, message: Message) -> _Answer:
        outputs = self.engine.forward(decode_batch(self._payload(message)), tuple(message.header["what"]))
        if self.rank != 0:
            return {}, b""
        return {}, encode({name: column for name, column in vars(outputs).items() if column is not None})

    def _stream(self, message: Message) -> _Answer:
        """Send the weights bucket by bucket, each when it is asked for; the next one is gathered meanwhile.

        The ranks go through the stream together, so one that is left early is still gone through to its end.
        """
        wanted = self.rank == 0
        for bucket in buckets(self.engine.publish().tensors(), self._bucket_bytes):
            content = encode(bucket) if wanted else b""
            wanted = wanted and self._channel.receive().header["call"] == "next"
            if wanted:
                self._channel.send({"names": list(bucket)}, content)
        if wanted:
            self._channel.receive()
        return {}, b""

    def _save(self, message: Message) -> _Answer:
        header = message.header
        self.engine.save(header["path"], kind=header["kind"], wait=header["wait"])
        return {}, b""

    def _saved(self, message: Message) -> _Answer:
        self.engine.saved()
        return {}, b""

    def _load(self, message: Message) -> _Answer:
        self.engine.load(message.header["path"])
        return {}, b""

    def _digest(self, message: Message) -> _Answer:
        return {"digest": self.engine.digest()}, b""

    def _health(self, message: Message) -> _Answer:
        return {"health": self.engine.health()}, b""


def _build(engine: str, arguments: dict[str, Any], device: torch.device) -> Any:
    for name, kind in (("optimizer", OptimizerConfig), ("options", Options)):
        if arguments.get(name) is not None:
            arguments[name] = kind(**arguments[name])
    return pkgutil.resolve_name(engine)(**arguments, device=device)


def _end_with_controller(connection: socket.socket) -> None:
    """End this process and what it started when the controller ends, even in the middle of a collective."""
    hang_up = select.poll()
    hang_up.register(connection, 0)
    hang_up.poll()
    os.killpg(0, signal.SIGKILL)


def _report(channel: Channel, error: BaseException) -> None:
    logging.getLogger(__name__).exception("rank %s failed in phase %s", os.environ["RANK"], phase.now())
    failure = {
        "types": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.monotonic(),
    }
    channel.send({"failure": failure})


def main(descriptor: int, stack_file: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when workers end
    channel = Channel(socket.socket(fileno=descriptor))
    threading.Thread(target=_end_with_controller, args=(channel.connection,), daemon=True).start()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for package in ("areal", "archon"):
        logging.getLogger(package).setLevel(logging.INFO)
    with stack_file.open("w") as stacks:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        try:
            Worker(channel).serve()
        except BaseException as error:  # SystemExit too: whatever ends a rank is reported
            _report(channel, error)
            while True:
                channel.receive()  # nothing comes: the controller looks at the other ranks, then ends this one


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
