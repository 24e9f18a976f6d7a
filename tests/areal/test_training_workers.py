"""Training in processes of its own equals the engine inline, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build, relative_error
from training_stand_in import ENGINE, MODEL, TENSORS

import archon
from archon import LossSpec, PackedBatch
from archon.parallel.fit import LayoutMisfit
from areal.launch import local
from areal.launch.local import LocalTrainer
from areal.launch.supervise import TrainingFailed, TrainingTimeout
from areal.launch.wire import buckets, decode, decode_batch, encode, encode_batch
from areal.training import TrainerClient

LOSS = LossSpec("archon.losses.SupervisedLoss")
NOTHING = LossSpec("none")


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[LocalTrainer]:
    """Two ranks without a model."""
    with LocalTrainer(
        MODEL, layout="d2", logs=tmp_path, device="cpu", engine=ENGINE, deadline=120, bucket_bytes=8000
    ) as trainer:
        yield trainer


def batch(seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = [{"input_ids": torch.randint(97, (length,), generator=generator)} for length in (3, 17, 1, 9)]
    return PackedBatch.from_sequences(rows).with_sequences(temperature=torch.tensor([1.0, 0.5, 1.0, 2.0]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_worker_equals_the_inline_engine_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    model = tmp_path / "model"
    build("qwen3_moe").save_pretrained(model)
    arguments: dict[str, Any] = {
        "optimizer": archon.OptimizerConfig(lr=1e-3),
        "dtype": dtype,
        "device": "cpu",
        "max_tokens_per_mb": 20,
    }
    engine = archon.Engine.from_pretrained(model, **arguments)
    threads = torch.get_num_threads()
    with LocalTrainer(model, logs=tmp_path / "logs", num_threads=threads, bucket_bytes=4000, **arguments) as trainer:
        assert isinstance(trainer, TrainerClient)
        assert trainer.config == engine.config
        found, expected = (one.forward(batch(), ("logprobs", "entropy")) for one in (trainer, engine))
        assert torch.equal(found.logprobs, expected.logprobs) and torch.equal(found.entropy, expected.entropy)
        assert found.values is None
        for step in range(2):
            metrics = trainer.train_step(batch(step), LOSS, n_minibatches=2)
            assert metrics == engine.train_step(batch(step), LOSS, n_minibatches=2)
        assert trainer.version == engine.version == 2
        publication = trainer.publish()
        assert publication.version == 2
        for (name, tensor), (known, value) in zip(publication.tensors(), engine.publish().tensors(), strict=True):
            assert name == known and tensor.dtype == value.dtype and torch.equal(tensor, value)
        assert trainer.digest() == engine.digest()
        trainer.save(tmp_path / "hf")
        trainer.save(tmp_path / "checkpoint", kind="checkpoint", wait=False)
        trainer.train_step(batch(), LOSS)
        trainer.saved()
        trainer.load(tmp_path / "checkpoint")
        assert (trainer.version, trainer.digest()) == (2, engine.digest())
        assert trainer.health()["version"] == 2 and trainer.health()["peak_memory_bytes"] > 0
    engine.save(tmp_path / "inline")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (
        tmp_path / "inline" / "model.safetensors"
    ).read_bytes()


def test_layout_parity_of_two_workers(tmp_path: Path) -> None:
    """Shards and experts over two processes: the same numbers in every call, and the same folder in the end."""
    model = tmp_path / "model"
    build("qwen3_moe").save_pretrained(model)
    arguments: dict[str, Any] = {
        "optimizer": archon.OptimizerConfig(lr=1e-4, eps=1e-6),
        "dtype": "float32",
        "device": "cpu",
        "max_tokens_per_mb": 20,
        "options": archon.Options(),
    }
    engine = archon.Engine.from_pretrained(model, **arguments)
    with LocalTrainer(model, layout="d2e2", logs=tmp_path / "logs", bucket_bytes=4000, **arguments) as trainer:
        for step in range(2):
            metrics, expected = (one.train_step(batch(step), LOSS) for one in (trainer, engine))
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        found, reference = (one.forward(batch()).logprobs for one in (trainer, engine))
        assert torch.allclose(found, reference, atol=1e-5, rtol=0)
        next(trainer.publish().tensors())  # and is left
        for (name, tensor), (known, value) in zip(trainer.publish().tensors(), engine.weights(), strict=True):
            assert name == known and relative_error(tensor, value) <= 1e-5
        trainer.save(tmp_path / "checkpoint", kind="checkpoint")
        digest = trainer.digest()
    engine.load(tmp_path / "checkpoint")
    assert (engine.version, engine.digest()) == (2, digest)


def test_all_ranks_get_the_batch_and_one_answers(stand_in: LocalTrainer) -> None:
    assert stand_in.train_step(batch(), NOTHING) == {"loss": 2.0 * batch().input_ids.sum()}
    assert torch.equal(stand_in.forward(batch()).logprobs, 2.0 * batch().input_ids)
    health = stand_in.health()
    assert health["version"] == 1 and health["peak_memory_bytes"] == 1 and len(health["processes"]) == 2


def test_a_stream_left_early_stops_nobody(stand_in: LocalTrainer) -> None:
    whole = [(f"weight.{TENSORS - number}", float(number)) for number in range(TENSORS)]
    left = stand_in.publish().tensors()
    assert next(left)[0] == whole[0][0]
    closed = stand_in.publish().tensors()
    assert [(name, float(value[-1])) for name, value in (next(closed), next(closed), next(closed))] == whole[:3]
    closed.close()
    publication = stand_in.publish()
    assert [(name, float(value[0])) for name, value in publication.tensors()] == whole
    stand_in.train_step(batch(), NOTHING)
    with pytest.raises(RuntimeError, match="a later call ended this stream"):
        list(left)
    with pytest.raises(RuntimeError, match="moved on to version 1"):
        list(publication.tensors())
    last = stand_in.publish().tensors()
    next(last)  # and is closed with the stream open


def test_what_cannot_be_sent_is_refused_before_anybody_waits(stand_in: LocalTrainer) -> None:
    with pytest.raises(TypeError, match="a loss goes to other processes by name"):
        stand_in.train_step(batch(), archon.losses.SupervisedLoss())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="set is not JSON"):
        stand_in.train_step(batch(), LossSpec("none", {"a": {1, 2}}))
    assert stand_in.train_step(batch(), NOTHING)


def test_a_call_past_its_deadline_shows_every_rank(stand_in: LocalTrainer) -> None:
    stand_in.deadline = 2.0
    with pytest.raises(TimeoutError) as caught:
        stand_in.train_step(batch(), LossSpec("none", {"rank": 1, "what": "sleep"}))
    assert isinstance(caught.value, TrainingTimeout) and caught.value.rank is None
    head, first, second = str(caught.value).split("\n\n")
    assert head == "train_step at version 0 has not ended within 2 s"
    assert "in phase reduce" in first and "in train_step" in first
    assert "in phase forward/backward of micro-batch 3" in second and "in misbehave" in second
    with pytest.raises(TrainingFailed, match="has not ended within 2 s"):
        stand_in.health()


def test_closing_ends_a_call_of_another_thread(stand_in: LocalTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "CLOSE_SECONDS", 2.0)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(stand_in.train_step, batch(), LossSpec("none", {"rank": 1, "what": "sleep"}))
        time.sleep(0.5)
        stand_in.close()
        with pytest.raises(TrainingFailed, match="was killed by SIGKILL"):
            running.result(timeout=10)


def test_what_the_engine_refuses_is_refused_as_inline(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LocalTrainer(tmp_path / "absent", logs=tmp_path)
    with pytest.raises(ValueError, match="layout"):
        LocalTrainer(MODEL, layout="d2x3", logs=tmp_path)
    with pytest.raises(LayoutMisfit, match="nearest layout that fits"):
        LocalTrainer(MODEL, layout="p64", logs=tmp_path)
    assert not list(tmp_path.iterdir())  # so far no process was started
    with pytest.raises(ValueError, match="refuse is 'yes'") as caught:
        LocalTrainer(MODEL, logs=tmp_path, device="cpu", engine=ENGINE, refuse="yes")
    assert isinstance(caught.value.__cause__, TrainingFailed)


CONTROLLER = """
import json, sys
from pathlib import Path
import torch
from archon import LossSpec, PackedBatch
from areal.launch.local import LocalTrainer
from training_stand_in import ENGINE, MODEL
trainer = LocalTrainer(MODEL, layout="d2", logs=sys.argv[1], device="cpu", engine=ENGINE)
print(json.dumps(trainer.health()["processes"]), flush=True)
batch = PackedBatch.from_sequences([{"input_ids": torch.arange(5)}])
trainer.train_step(batch, LossSpec("none", {"rank": 1, "what": "sleep"}))
"""


def test_workers_end_with_their_controller(tmp_path: Path) -> None:
    """Killed with SIGKILL, while one worker is in a collective and one is asleep."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as controller:
        assert controller.stdout is not None
        pids = json.loads(controller.stdout.readline())
        time.sleep(1.0)
        assert all(map(alive, pids))
        os.kill(controller.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < end, f"{pids} outlive their controller"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tensors_cross_whatever_they_share() -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = {
        "transposed": whole.T,
        "row": whole[1],
        "again": whole,
        "and again": whole,
        "mask": torch.tensor([True, False]),
        "bf16": torch.tensor([1.5], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3, dtype=torch.int32),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
    }
    found = decode(encode(tensors))
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in tensors.items())
    assert len(found) == len(tensors)


def test_a_batch_crosses_with_all_its_columns() -> None:
    sent = batch().with_tokens(routed_experts=torch.zeros(30, 2, 2, dtype=torch.int32))
    found = decode_batch(encode_batch(sent))
    assert found.tokens.keys() == sent.tokens.keys() and found.sequences.keys() == sent.sequences.keys()
    assert all(torch.equal(found[name], sent[name]) for name in [*sent.tokens, *sent.sequences])
    assert torch.equal(found.input_ids, sent.input_ids) and torch.equal(found.cu_seqlens, sent.cu_seqlens)


def test_buckets_hold_what_fits() -> None:
    sizes = {"a": 1, "b": 2, "c": 9, "d": 4, "e": 1}
    named = [(name, torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items()]
    assert [list(bucket) for bucket in buckets(named, 4)] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(buckets([], 4)) == []
