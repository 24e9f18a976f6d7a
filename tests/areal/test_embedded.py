"""The embedded engine: what only holds for an engine inside the training process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3MoeConfig

from archon.weights import digest, named_weights
from areal.inference import serving_model
from areal.inference.backend import BackendError, Chunk, GenerationRequest
from areal.inference.embedded import EmbeddedBackend

CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    max_position_embeddings=256,
    initializer_range=0.15,
    eos_token_id=None,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    CONFIG.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trained() -> Iterator[torch.nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield AutoModelForCausalLM.from_config(CONFIG).eval()


async def publish(backend: EmbeddedBackend, model: torch.nn.Module, version: int = 0) -> None:
    await backend.commit(version, await backend.stage(version, named_weights(model)))


async def collect(backend: EmbeddedBackend, request: GenerationRequest) -> list[Chunk]:
    return [chunk async for chunk in backend.generate(request)]


def truth(model: torch.nn.Module, ids: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return logprobs[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def test_the_global_generator_is_left_alone(folder: Path, trained: torch.nn.Module) -> None:
    async def run() -> None:
        backend = EmbeddedBackend(folder, kv_cache_tokens=1024)
        await backend.start()
        await publish(backend, trained)
        await collect(backend, GenerationRequest("a", [1, 2], 20))
        await backend.stop()

    torch.manual_seed(7)
    state = torch.get_rng_state()
    asyncio.run(run())
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_are_set_for_the_generation_thread_alone(folder: Path) -> None:
    async def run() -> tuple[int, int]:
        backend = EmbeddedBackend(folder, kv_cache_tokens=1024, num_threads=1)
        await backend.start()
        assert backend._loop is not None
        inside = await asyncio.wrap_future(backend._loop.call(torch.get_num_threads))
        later = await asyncio.to_thread(torch.get_num_threads)
        await backend.stop()
        return inside, later

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    try:
        assert asyncio.run(run()) == (1, 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_full_cache_recomputes_and_stays_exact(folder: Path, trained: torch.nn.Module) -> None:
    requests = [GenerationRequest(str(i), [i, i + 1], 150) for i in range(12)]

    async def run() -> list[list[Chunk]]:
        backend = EmbeddedBackend(folder, kv_cache_tokens=512, num_threads=1)
        await backend.start()
        await publish(backend, trained)
        try:
            return await asyncio.gather(*[collect(backend, request) for request in requests])
        finally:
            await backend.stop()

    for request, (chunk,) in zip(requests, asyncio.run(run()), strict=True):
        assert len(chunk.token_ids) == 150
        expected = truth(trained, [*request.input_ids, *chunk.token_ids])[1:]
        assert chunk.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_crash_reaches_every_reader_within_a_second(folder: Path, trained: torch.nn.Module) -> None:
    async def run() -> float:
        backend = EmbeddedBackend(folder, kv_cache_tokens=4096)
        await backend.start()
        await publish(backend, trained)
        readers = [asyncio.ensure_future(collect(backend, GenerationRequest(str(i), [i], 200))) for i in range(8)]
        while backend.metrics()["inference/generated_tokens"] < 40:
            await asyncio.sleep(0.001)
        assert backend._loop is not None
        backend._loop.model = None  # the next step cannot run
        crashed = time.monotonic()
        results = await asyncio.gather(*readers, return_exceptions=True)
        seconds = time.monotonic() - crashed
        assert all(isinstance(result, BackendError) and "NoneType" in str(result) for result in results)
        with pytest.raises(BackendError, match="failed in step"):
            await collect(backend, GenerationRequest("late", [1], 2))
        with pytest.raises(BackendError, match="failed in step"):
            await backend.pause()
        await backend.stop()
        await backend.start()
        await publish(backend, trained)
        assert (await collect(backend, GenerationRequest("again", [1], 2)))[-1].finish_reason == "length"
        await backend.stop()
        return seconds

    assert asyncio.run(run()) < 1.0


def test_a_failed_switch_stays_unhealthy_until_a_full_commit(
    folder: Path, trained: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        backend = EmbeddedBackend(folder, kv_cache_tokens=4096)
        await backend.start()
        await publish(backend, trained)
        reader = asyncio.ensure_future(collect(backend, GenerationRequest("a", [1], 200)))
        while backend.metrics()["inference/generated_tokens"] < 5:
            await asyncio.sleep(0.001)
        assert backend._loop is not None

        def fail() -> None:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(backend._loop.batching, "clear", fail)
            with pytest.raises(BackendError, match="half-way"):
                await publish(backend, trained, 1)
        with pytest.raises(BackendError, match="no room"):
            await reader
        for refused in (collect(backend, GenerationRequest("b", [1], 2)), backend.score([[1, 2]])):
            with pytest.raises(BackendError, match="stage and commit"):
                await refused
        await backend.stage(2, named_weights(trained))
        with pytest.raises(BackendError, match="stage and commit"):
            await backend.score([[1, 2]])
        await publish(backend, trained, 2)
        (chunk,) = await collect(backend, GenerationRequest("c", [1], 5))
        assert chunk.version == 2
        assert chunk.logprobs == pytest.approx(truth(trained, [1, *chunk.token_ids]), abs=1e-5)
        await backend.stop()

    asyncio.run(run())


def test_a_cancelled_stage_leaves_room_for_the_next(folder: Path, trained: torch.nn.Module) -> None:
    async def run() -> None:
        backend = EmbeddedBackend(folder, kv_cache_tokens=1024)
        await backend.start()
        await publish(backend, trained)
        go_on = threading.Event()

        def slow() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named_weights(trained):
                yield name, tensor + 1
                go_on.wait(5)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await backend.stage(1, slow())
        threading.Timer(0.05, go_on.set).start()
        await publish(backend, trained, 1)
        assert backend.digest == digest(named_weights(trained))
        (chunk,) = await collect(backend, GenerationRequest("c", [1], 5))
        assert chunk.logprobs == pytest.approx(truth(trained, [1, *chunk.token_ids]), abs=1e-5)
        await backend.stop()

    asyncio.run(run())


def test_end_of_sequence_ids_come_from_the_folder(tmp_path: Path) -> None:
    Qwen3MoeConfig(eos_token_id=5).save_pretrained(tmp_path)
    assert serving_model.stop_token_ids(tmp_path) == {5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert serving_model.stop_token_ids(tmp_path) == {7, 8}


def test_unsupported_models_and_sizes_are_refused(tmp_path: Path, folder: Path) -> None:
    MistralConfig(sliding_window=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="full causal attention"):
        asyncio.run(EmbeddedBackend(tmp_path).start())
    with pytest.raises(ValueError, match="max_model_len 300"):
        EmbeddedBackend(folder, max_model_len=300)
    with pytest.raises(ValueError, match="kv_cache_tokens"):
        asyncio.run(EmbeddedBackend(folder, kv_cache_tokens=100).start())


def test_bfloat16_stays_close(folder: Path, trained: torch.nn.Module) -> None:
    async def run() -> Chunk:
        backend = EmbeddedBackend(folder, dtype="bfloat16", kv_cache_tokens=1024)
        await backend.start()
        await publish(backend, trained)
        (chunk,) = await collect(backend, GenerationRequest("a", [1, 2, 3], 30))
        await backend.stop()
        return chunk

    chunk = asyncio.run(run())
    expected = torch.tensor(truth(trained, [1, 2, 3, *chunk.token_ids])[2:])
    assert (torch.tensor(chunk.logprobs) - expected).abs().mean() < 0.1
