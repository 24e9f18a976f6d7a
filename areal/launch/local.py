"""LocalTrainer: training in one process per rank of a layout, on this machine, behind ``TrainerClient``."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from archon import phase
from archon.batch import PackedBatch
from archon.engine import Publication
from archon.layout import Layout
from archon.losses import LossSpec, TokenOutputs
from archon.models.config import ModelConfig
from archon.options import Options
from archon.parallel.fit import check_fit
from archon.weights import WeightsError
from areal.launch.supervise import CLOSE_SECONDS, Member, Team, TrainingFailed
from areal.launch.wire import Channel, Message, encode_batch

logger = logging.getLogger(__name__)

ENGINE = "archon.engine:Engine.from_pretrained"
FAILURE_SECONDS = 60.0
"""A call whose processes were killed has noticed, told what each of them did, and ended well before."""


class LocalTrainer:
    """A model under training in ``layout.world_size`` processes of this machine; a ``TrainerClient``.

    ::

        with LocalTrainer(folder, layout="d2t2", logs=run / "logs", optimizer=OptimizerConfig(lr=1e-5)) as trainer:
            trainer.train_step(batch, LossSpec("archon.losses.SupervisedLoss"))

    A rank that dies or raises ends all of them: the call raises ``TrainingFailed``, and so does every later one. Calls
    from several threads take turns. A stream of ``publish()`` that was left early is ended by the next call.

    Args:
        path, layout, arguments: of ``Engine.from_pretrained``.
        logs: folder for ``trainer_rank<r>.log``, which hold all that the processes print; they are appended to.
        deadline: seconds that the start, one call, or one bucket of weights may take.
        num_threads: cores for all ranks together, None takes all; every rank gets one at least. ``OMP_NUM_THREADS``,
            where it is set, is instead what each rank gets.
        bucket_bytes: of one message of a stream of weights; a larger tensor has a message of its own.
        engine: import path ``module:name`` of what builds the engine.

    Attributes:
        version: completed training steps.
        config: the model's shape.

    Raises:
        FileNotFoundError: the model folder or its ``config.json`` is missing.
        LayoutMisfit: the model or the options do not fit the layout; no process was started.
        ValueError: the engine refuses the model or another argument.
        TrainingFailed: a process did not start.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        logs: str | Path,
        layout: str | Layout = "d1",
        deadline: float = 3600.0,
        num_threads: int | None = None,
        bucket_bytes: int = 16 << 20,
        engine: str = ENGINE,
        **arguments: Any,
    ) -> None:
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        self.config = ModelConfig.from_folder(path)
        check_fit(layout, self.config, arguments.get("options") or Options())
        self.version = 0
        self.deadline = deadline
        self._turn = threading.Lock()
        self._stream: object | None = None
        Path(logs).mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(prefix=".trainer_", dir=logs)
        device = arguments.pop("device", None)
        start = {
            "engine": engine,
            "arguments": {"path": str(path), "layout": str(layout), **_as_json(arguments)},
            "device": None if device is None else str(device),
            "rendezvous": str(Path(self._scratch.name) / "rendezvous"),
            "deadline": deadline,
            "bucket_bytes": bucket_bytes,
        }
        self._team = _start_processes(layout.world_size, Path(logs), Path(self._scratch.name), num_threads)
        try:
            with self._exclusively("the start of training"):
                self._exchange("the start of training", start)
        except BaseException as error:
            self.close()
            if isinstance(error, TrainingFailed):
                for kind in (FileNotFoundError, WeightsError, ValueError):
                    if kind.__name__ in error.types:
                        raise kind(error.reason) from error
            raise

    # TrainerClient

    def train_step(self, batch: PackedBatch, loss: LossSpec, *, n_minibatches: int = 1) -> dict[str, float]:
        """As ``Engine.train_step``.

        Raises:
            TypeError: the loss is no LossSpec, or its configuration is not JSON.
        """
        if not isinstance(loss, LossSpec):
            raise TypeError(f"a loss goes to other processes by name: give LossSpec('module.Class'), not {loss!r}")
        arguments = {"loss": asdict(loss), "n_minibatches": n_minibatches}
        json.dumps(arguments)
        metrics: dict[str, float] = self._call("train_step", arguments, encode_batch(batch))[0].header["metrics"]
        return metrics

    def forward(self, batch: PackedBatch, what: Sequence[str] = ("logprobs",)) -> TokenOutputs:
        return TokenOutputs(**self._call("forward", {"what": list(what)}, encode_batch(batch))[0].tensors())

    def publish(self) -> Publication:
        """The weights of now, to be read before the next step; they arrive one bucket at a time."""
        version = self.version
        return Publication(version, lambda: self._weights(version))

    def save(self, path: str | Path, kind: Literal["hf", "checkpoint"] = "hf", *, wait: bool = True) -> None:
        self._call("save", {"path": str(Path(path).absolute()), "kind": kind, "wait": wait})

    def saved(self) -> None:
        """Wait until what ``save`` began with ``wait`` False is on the disk; ``close`` does not."""
        self._call("saved")

    def load(self, path: str | Path) -> None:
        self._call("load", {"path": str(Path(path).absolute())})

    def digest(self) -> str:
        digest: str = self._call("digest")[0].header["digest"]
        return digest

    def health(self) -> dict[str, Any]:
        """What the engine of rank 0 says, ``peak_memory_bytes`` of the rank with most, and ``processes``, their ids."""
        reports = [message.header["health"] for message in self._call("health")]
        peak = max(report["peak_memory_bytes"] for report in reports)
        return {**reports[0], "peak_memory_bytes": peak, "processes": [m.process.pid for m in self._team.members]}

    def close(self) -> None:
        """End the processes; a call of another thread that still runs fails. Idempotent."""
        if not self._turn.acquire(timeout=CLOSE_SECONDS):
            logger.warning("training is closed in the middle of a call of another thread")
            for member in self._team.members:
                member.kill()
            if not self._turn.acquire(timeout=FAILURE_SECONDS):
                return  # that call frees the rest when it ends
        try:
            if self._team.failure is None:
                self._team.failure = TrainingFailed("the trainer was closed")
                if self._stream is None:
                    self._dismiss()
            self._team.end()
        finally:
            self._turn.release()
        self._scratch.cleanup()

    def _dismiss(self) -> None:
        """Let idle processes leave by themselves, so that collectives are shut down in order."""
        try:
            for rank in self._ranks:
                self._team.tell(rank, {"call": "close"}, what="close", seconds=CLOSE_SECONDS)
        except TrainingFailed as failure:
            logger.warning("found when training was closed: %s", failure)
        self._team.end(CLOSE_SECONDS)

    def __enter__(self) -> LocalTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Messages

    @property
    def _ranks(self) -> range:
        return range(len(self._team.members))

    @contextmanager
    def _exclusively(self, what: str, stream: object | None = None) -> Iterator[None]:
        """One call at a time, or one bucket of a stream; another open stream is ended first.

        What breaks off half-way leaves nobody who could be spoken with, so the processes are ended.
        """
        if not self._turn.acquire(timeout=self.deadline):
            raise TimeoutError(f"{what} waited {self.deadline:g} s for a call of another thread to end")
        try:
            if self._team.failure is not None:
                raise TrainingFailed(f"{what}: training has ended before. {self._team.failure}")
            if stream is not None and stream is not self._stream:
                raise RuntimeError(f"{what}: a later call ended this stream of weights")
            try:
                if stream is None:
                    self._end_stream(what)
                yield
            except BaseException as error:
                self._team.failure = self._team.failure or TrainingFailed(f"{what} was interrupted by {error!r}")
                self._team.end()
                raise
        finally:
            self._turn.release()

    def _call(self, call: str, arguments: dict[str, Any] | None = None, payload: bytes = b"") -> list[Message]:
        what = f"{call} at version {self.version}"
        with self._exclusively(what):
            return self._exchange(what, {"call": call, **(arguments or {})}, payload)

    def _exchange(self, what: str, header: dict[str, Any], payload: bytes = b"") -> list[Message]:
        """Give all ranks the header and rank 0 the payload; returns the answers of all."""
        header = {**header, "payload_bytes": len(payload)}
        for rank in self._ranks:
            self._tell(rank, header, what, b"" if rank else payload)
        answers = self._hear(self._ranks, what)
        self.version = answers[0].header["version"]
        return answers

    def _tell(self, rank: int, header: dict[str, Any], what: str, payload: bytes = b"") -> None:
        self._team.tell(rank, header, payload, what=what, seconds=self.deadline)

    def _hear(self, ranks: Sequence[int], what: str) -> list[Message]:
        return self._team.hear(ranks, what=what, seconds=self.deadline)

    # Weights

    def _weights(self, version: int) -> Iterator[tuple[str, Tensor]]:
        stream, what = object(), f"publish of version {version}"
        if self.version != version:
            raise RuntimeError(f"{what}: the weights have moved on to version {self.version}")
        with self._exclusively(what):
            self._stream = stream
            for rank in self._ranks:
                self._tell(rank, {"call": "stream"}, what)
        while True:
            with self._exclusively(what, stream):
                self._tell(0, {"call": "next"}, what)
                message = self._hear([0], what)[0]
                if "names" not in message.header:
                    self._stream = None
                    self._hear(self._ranks[1:], what)
                    return
            tensors = message.tensors()
            for name in message.header["names"]:
                yield name, tensors.pop(name)

    def _end_stream(self, what: str) -> None:
        """The ranks go through a stream together, so they go through the rest of it, which is not sent."""
        if self._stream is not None:
            self._stream = None
            self._tell(0, {"call": "stop"}, what)
            self._hear(self._ranks, what)


def _as_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in arguments.items()
    }


def _start_processes(count: int, logs: Path, scratch: Path, num_threads: int | None) -> Team:
    logs.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "PYTHONPATH": os.pathsep.join(sys.path),  # a loss may lie where only this process looks
        "PYTHONUNBUFFERED": "1",  # what a process printed before it was killed is in its log
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (num_threads or cores) // count))),
    }
    if sys.platform == "linux":
        common["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    members = [_start_process(rank, os.environ | common, logs, scratch) for rank in range(count)]
    pids = ", ".join(str(member.process.pid) for member in members)
    logger.info("training starts in %d processes (%s); they write to %s", count, pids, logs)
    return Team(members)


def _start_process(rank: int, environment: Mapping[str, str], logs: Path, scratch: Path) -> Member:
    log, phase_file, stack_file = logs / f"trainer_rank{rank}.log", scratch / f"phase{rank}", scratch / f"stack{rank}"
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as output:
        log_start = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "areal.launch.worker", str(theirs.fileno()), str(stack_file)],
            env={
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                phase.ENVIRONMENT_VARIABLE: str(phase_file),
            },
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # ended with what it started; an interrupt at the terminal is the controller's to handle
        )
        return Member(rank, process, Channel(ours), phase_file, stack_file, log, log_start)
