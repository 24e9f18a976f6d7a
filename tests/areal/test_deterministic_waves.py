"""Deterministic sampling: the same tokens and log-probs, bit for bit, whatever the timing."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from archon.weights import named_weights
from areal.inference.backend import Backend, Chunk, GenerationRequest
from areal.inference.deterministic import DeterministicWaves
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
Samples = dict[tuple[int, ...], tuple[list[int], list[float], str | None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    CONFIG.save_pretrained(path)
    return path


async def started(folder: Path, seed: int) -> DeterministicWaves:
    backend = DeterministicWaves(EmbeddedBackend(folder, num_threads=1, seed=seed, deterministic=True))
    assert isinstance(backend, Backend)
    await backend.start()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG)
    await backend.commit(0, await backend.stage(0, named_weights(model)))
    return backend


def episodes(folder: Path, *, seed: int = 0, timing: int, n: int = 24, concurrent: int = 9) -> Samples:
    """Two-turn episodes, a few at a time, with delays drawn from ``timing``."""
    delays = random.Random(timing)
    samples: Samples = {}

    async def run() -> None:
        backend = await started(folder, seed)
        live = 0
        waiting = list(range(n))

        async def episode(position: int) -> None:
            nonlocal live
            prompt = [position % 64, 3]
            for turn in range(1 + position % 2):
                await asyncio.sleep(delays.random() * 0.004)
                request = GenerationRequest(f"{position}.{turn}", prompt, 4 + position % 5, order=(position, turn))
                chunks = [chunk async for chunk in backend.generate(request)]
                tokens = [token for chunk in chunks for token in chunk.token_ids]
                logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
                samples[position, turn] = tokens, logprobs, chunks[-1].finish_reason
                prompt = prompt + tokens
            live -= 1
            backend.set_live(live)
            admit()

        tasks: list[asyncio.Task[None]] = []

        def admit() -> None:
            # Admission in steps of a batch, as a synchronous trainer admits.
            nonlocal live
            if live == 0 and waiting:
                for position in waiting[:concurrent]:
                    live += 1
                    tasks.append(asyncio.ensure_future(episode(position)))
                    backend.set_live(live)
                del waiting[:concurrent]

        admit()
        while len(samples) < n + n // 2:
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
        await backend.stop()

    asyncio.run(asyncio.wait_for(run(), 60))
    return samples


def test_timing_changes_nothing(folder: Path) -> None:
    first = episodes(folder, timing=1)
    assert len(first) == 36
    assert episodes(folder, timing=2) == first
    assert episodes(folder, timing=1, seed=1) != first


def test_repeats_of_an_order_differ_and_versions_differ(folder: Path) -> None:
    async def run() -> list[list[int]]:
        backend = await started(folder, 0)
        results = []
        for version in (0, 0, 1):
            if version > backend.version:
                model = AutoModelForCausalLM.from_config(CONFIG)
                await backend.commit(1, await backend.stage(1, named_weights(model)))
            backend.set_live(1)
            request = GenerationRequest("a", [1], 12, order=(0, 0))
            results.append([token async for chunk in backend.generate(request) for token in chunk.token_ids])
        await backend.stop()
        return results

    first, second, third = asyncio.run(run())
    assert first != second != third


def test_held_requests_can_be_aborted_cancelled_and_stopped(folder: Path) -> None:
    async def run() -> None:
        backend = await started(folder, 0)
        backend.set_live(10)

        def hold(name: str) -> asyncio.Future[list[Chunk]]:
            async def collect() -> list[Chunk]:
                request = GenerationRequest(name, [1], 5, order=(ord(name),))
                return [chunk async for chunk in backend.generate(request)]

            return asyncio.ensure_future(collect())

        readers = {name: hold(name) for name in "abcd"}
        await asyncio.sleep(0.02)
        assert backend.metrics()["inference/held"] == 4
        await backend.abort("a")
        assert [chunk.finish_reason for chunk in await readers["a"]] == ["abort"]
        readers["b"].cancel()
        await asyncio.wait([readers["b"]])
        assert backend.metrics()["inference/held"] == 2
        assert not readers["c"].done()
        backend.set_live(2)
        assert len((await readers["c"])[0].token_ids) == 5
        assert len((await readers["d"])[0].token_ids) == 5
        last = hold("e")
        backend.set_live(2)
        await asyncio.sleep(0.02)
        assert not last.done()
        await backend.stop()
        assert [chunk.finish_reason for chunk in await last] == ["abort"]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_reader_cancelled_as_its_wave_starts_leaves_nothing(folder: Path) -> None:
    async def run() -> None:
        backend = await started(folder, 0)
        for steps in range(12):
            request = GenerationRequest("a", [1], 200, order=(steps,))
            chunks = backend.generate(request)
            reader = asyncio.ensure_future(anext(chunks))
            for _ in range(steps):
                await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
            await asyncio.sleep(0.05)
            metrics = backend.metrics()
            assert (metrics["inference/held"], metrics["inference/running"]) == (0, 0), steps
        await backend.stop()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_engine_that_is_not_deterministic_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="deterministic"):
        DeterministicWaves(EmbeddedBackend(folder))


def test_a_request_without_order_is_refused(folder: Path) -> None:
    async def run() -> None:
        backend = await started(folder, 0)
        with pytest.raises(ValueError, match="order"):
            async for _ in backend.generate(GenerationRequest("a", [1], 5)):
                pass
        await backend.stop()

    asyncio.run(run())
