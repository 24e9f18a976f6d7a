"""What every rollout engine must do, against transformers' full forward as the truth.

An engine joins by a line in ``ENGINES``: a function from a model folder to a backend that is not started.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from archon.weights import WeightsError, digest, named_weights
from areal.inference.backend import Backend, BackendError, Chunk, DigestMismatch, GenerationRequest
from areal.inference.embedded import EmbeddedBackend

R = TypeVar("R")
VOCAB, MAX_LEN = 64, 512
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=True
    ),
}
ENGINES: dict[str, Callable[[Path], Backend]] = {
    "embedded": lambda folder: EmbeddedBackend(folder, kv_cache_tokens=64 * MAX_LEN, num_threads=1),
}


class Harness:
    """A started engine, the event loop it lives in, and the trainer's model of every published version."""

    def __init__(self, make: Callable[[Path], Backend], folder: Path, config: PretrainedConfig) -> None:
        self.config = config
        self.models: dict[int, Any] = {}
        self.backend = make(folder)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._ids = 0

    def run(self, coroutine: Coroutine[Any, Any, R], timeout_s: float = 60.0) -> R:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, timeout_s), self.loop).result()

    def close(self) -> None:
        self.run(self.backend.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def trained(self, version: int) -> Any:
        """The trainer's model at a version: same for everyone who asks."""
        with torch.random.fork_rng():
            torch.manual_seed(version)
            return AutoModelForCausalLM.from_config(self.config, attn_implementation="eager").eval()

    async def stage(self, version: int) -> str:
        self.models[version] = self.trained(version)
        sent = digest(named_weights(self.models[version]))
        assert await self.backend.stage(version, named_weights(self.models[version])) == sent
        return sent

    async def publish(self) -> int:
        version = self.backend.version + 1
        await self.backend.commit(version, await self.stage(version))
        return version

    def request(self, prompt: list[int] | None = None, max_new_tokens: int = 8, **kwargs: Any) -> GenerationRequest:
        self._ids += 1
        return GenerationRequest(f"r{self._ids}", prompt or [3, 1, 4, 1, 5], max_new_tokens, **kwargs)

    async def collect(self, request: GenerationRequest) -> list[Chunk]:
        return [chunk async for chunk in self.backend.generate(request)]

    async def generated(self, tokens: int) -> None:
        """Wait until the engine has sampled so many more tokens."""
        start = self.backend.metrics()["inference/generated_tokens"]
        while self.backend.metrics()["inference/generated_tokens"] < start + tokens:
            await asyncio.sleep(0.002)

    @torch.no_grad()
    def truth(self, version: int, ids: list[int], temperature: float = 1.0) -> list[float]:
        """Log-prob of every token but the first by a full forward."""
        logits = self.models[version](torch.tensor([ids])).logits[0].double() / temperature
        return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def check(self, request: GenerationRequest, chunks: list[Chunk]) -> None:
        """Every token's log-prob is that of the weights its chunk names; one final chunk."""
        assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        ids, start = list(request.input_ids), 0
        ids += [token for chunk in chunks for token in chunk.token_ids]
        start = len(request.input_ids)
        for chunk in chunks:
            assert len(chunk.logprobs) == len(chunk.token_ids)
            end = start + len(chunk.token_ids)
            expected = self.truth(chunk.version, ids, request.temperature)[start - 1 : end - 1]
            assert chunk.logprobs == pytest.approx(expected, abs=1e-5)
            start = end


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for family, config in FAMILIES.items():
        folders[family] = tmp_path_factory.mktemp(family)
        config.save_pretrained(folders[family])
    return folders


@pytest.fixture(scope="module", params=[(engine, family) for engine in ENGINES for family in FAMILIES], ids="-".join)
def any_model(request: pytest.FixtureRequest, model_folders: dict[str, Path]) -> Iterator[Harness]:
    """For what depends on the architecture."""
    engine, family = request.param
    yield from _started(engine, model_folders[family], family)


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest, model_folders: dict[str, Path]) -> Iterator[Harness]:
    """For what does not."""
    yield from _started(request.param, model_folders["qwen3_moe"], "qwen3_moe")


def _started(engine: str, folder: Path, family: str) -> Iterator[Harness]:
    harness = Harness(ENGINES[engine], folder, FAMILIES[family])
    assert isinstance(harness.backend, Backend)
    harness.run(harness.backend.start())
    with pytest.raises(BackendError, match="no weights"):
        harness.run(harness.collect(harness.request()))
    harness.run(harness.publish())
    yield harness
    harness.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward(any_model: Harness, temperature: float) -> None:
    prompts = [[1], list(range(2, 39)), [7, 7, 7], list(range(60)) * 2]
    requests = [any_model.request(prompt, 20, temperature=temperature) for prompt in prompts]
    cut = [any_model.request([5, 6, 7], 20, temperature=temperature, top_k=5, top_p=0.8) for _ in range(4)]

    async def all_together() -> list[list[Chunk]]:
        return await asyncio.gather(*[any_model.collect(request) for request in requests + cut])

    for request, chunks in zip(requests + cut, any_model.run(all_together()), strict=True):
        any_model.check(request, chunks)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 20
        assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score_equals_a_full_forward(any_model: Harness, temperature: float) -> None:
    sequences = [[1], [9, 8, 7], list(range(50)), [4] * 200, []]
    scores = any_model.run(any_model.backend.score(sequences, temperature))
    for ids, values in zip(sequences, scores, strict=True):
        expected = (
            [0.0, *any_model.truth(any_model.backend.version, ids, temperature)] if len(ids) > 1 else [0.0] * len(ids)
        )
        assert values == pytest.approx(expected, abs=1e-5)


def test_update_while_generating_keeps_versions_exact(any_model: Harness) -> None:
    requests = [any_model.request([token], 150, temperature=0.7) for token in range(6)]

    async def update() -> tuple[int, list[list[Chunk]]]:
        old = any_model.backend.version
        sent = await any_model.stage(old + 1)
        running = asyncio.gather(*[any_model.collect(request) for request in requests])
        await any_model.generated(6 * 20)
        await any_model.backend.commit(old + 1, sent)
        return old, await running

    old, results = any_model.run(update())
    for request, chunks in zip(requests, results, strict=True):
        assert [chunk.version for chunk in chunks] == [old, old + 1]
        assert sum(len(chunk.token_ids) for chunk in chunks) == 150
        any_model.check(request, chunks)


def _chi_square(tokens: list[int], probs: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; outcomes expected less than five times are put together."""
    expected = probs * len(tokens)
    observed = torch.bincount(torch.tensor(tokens), minlength=len(probs)).double()
    rare = expected < 5
    merged = (
        torch.cat([expected[~rare], expected[rare].sum()[None]]),
        torch.cat([observed[~rare], observed[rare].sum()[None]]),
    )
    used = merged[0] > 0
    return float(((merged[1] - merged[0]) ** 2 / merged[0])[used].sum()), int(used.sum()) - 1


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 6, 1.0), (1.0, 0, 0.6)]
)
def test_samples_follow_the_distribution(engine: Harness, temperature: float, top_k: int, top_p: float) -> None:
    async def first_tokens() -> list[int]:
        requests = [
            engine.request([2, 4, 8], 1, temperature=temperature, top_k=top_k, top_p=top_p) for _ in range(3000)
        ]
        return [chunks[0].token_ids[0] for chunks in await asyncio.gather(*map(engine.collect, requests))]

    tokens = engine.run(first_tokens())
    with torch.no_grad():
        logits = engine.models[engine.backend.version](torch.tensor([[2, 4, 8]])).logits[0, -1].double()
    probs = (logits / temperature).softmax(-1)
    ordered, order = probs.sort(descending=True)
    kept = order[: top_k or None][(ordered.cumsum(0) - ordered)[: top_k or None] < top_p]
    probs = torch.zeros_like(probs).index_copy(0, kept, probs[kept])
    assert set(tokens) <= set(kept.tolist())
    statistic, freedom = _chi_square(tokens, probs / probs.sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_zero_temperature_is_greedy(engine: Harness) -> None:
    request = engine.request([3, 1, 4], 10, temperature=0.0)
    (chunk,) = engine.run(engine.collect(request))
    ids = [3, 1, 4, *chunk.token_ids]
    with torch.no_grad():
        logits = engine.models[chunk.version](torch.tensor([ids])).logits[0]
    assert logits[2:-1].argmax(-1).tolist() == chunk.token_ids
    assert chunk.logprobs == pytest.approx(engine.truth(chunk.version, ids)[2:], abs=1e-5)


def test_stop_token_ends_and_is_kept(engine: Harness) -> None:
    stop = tuple(range(0, VOCAB, 4))
    chunks = engine.run(engine.collect(engine.request([9], 100, stop_token_ids=stop)))
    assert chunks[-1].finish_reason == "stop"
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens[-1] in stop
    assert not set(tokens[:-1]) & set(stop)


def test_model_length_ends_a_completion(engine: Harness) -> None:
    (chunk,) = engine.run(engine.collect(engine.request([1] * (MAX_LEN - 5), 100)))
    assert (len(chunk.token_ids), chunk.finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": [1] * MAX_LEN}, "512"),
        ({"prompt": [VOCAB]}, "vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_impossible_requests_are_refused(engine: Harness, change: dict[str, Any], message: str) -> None:
    before = engine.backend.metrics()["inference/generated_tokens"]
    with pytest.raises(ValueError, match=message):
        engine.run(engine.collect(engine.request(**change)))
    assert engine.backend.metrics()["inference/generated_tokens"] == before


def test_64_at_once(engine: Harness) -> None:
    requests = [engine.request([i % VOCAB] * (1 + i % 17), 1 + i % 23) for i in range(64)]

    async def all_together() -> list[list[Chunk]]:
        return await asyncio.gather(*map(engine.collect, requests))

    for request, chunks in zip(requests, engine.run(all_together()), strict=True):
        assert sum(len(chunk.token_ids) for chunk in chunks) == request.max_new_tokens
        engine.check(request, chunks)
    assert engine.backend.metrics()["inference/running"] == 0


def test_nothing_is_sampled_while_paused(engine: Harness) -> None:
    async def pause() -> list[Chunk]:
        running = asyncio.ensure_future(engine.collect(engine.request([5], 60)))
        await engine.generated(5)
        await engine.backend.pause()
        await engine.backend.pause()
        counts = [engine.backend.metrics()["inference/generated_tokens"]]
        await asyncio.sleep(0.1)
        await engine.backend.resume()
        await asyncio.sleep(0.1)
        counts.append(engine.backend.metrics()["inference/generated_tokens"])
        assert counts[0] == counts[1]
        assert not running.done()
        await engine.publish()
        await engine.backend.resume()
        return await running

    chunks = engine.run(pause())
    assert sum(len(chunk.token_ids) for chunk in chunks) == 60
    with pytest.raises(BackendError, match="resume"):
        engine.run(engine.backend.resume())


@pytest.mark.parametrize("everyone", [False, True])
def test_abort_gives_what_was_generated(engine: Harness, everyone: bool) -> None:
    requests = [engine.request([8, 9], 400) for _ in range(3)]

    async def abort() -> list[list[Chunk]]:
        running = [asyncio.ensure_future(engine.collect(request)) for request in requests]
        await engine.generated(15)
        await engine.backend.abort(None if everyone else requests[1].request_id)
        await engine.backend.abort("unknown")
        return await asyncio.gather(*running)

    for index, (request, chunks) in enumerate(zip(requests, engine.run(abort()), strict=True)):
        engine.check(request, chunks)
        aborted = everyone or index == 1
        assert chunks[-1].finish_reason == ("abort" if aborted else "length")
        assert (0 < sum(len(chunk.token_ids) for chunk in chunks) < 400) == aborted


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_reader_that_leaves_stops_the_generation(engine: Harness, how: str) -> None:
    async def leave() -> float:
        request = engine.request([8], 500)
        chunks = engine.backend.generate(request)
        reader = asyncio.ensure_future(anext(chunks))  # type: ignore[arg-type]
        await engine.generated(3)
        if how == "close":
            # A chunk boundary lets the reader hold the generator between two chunks.
            await engine.publish()
            await reader
            await chunks.aclose()  # type: ignore[attr-defined]
        else:
            reader.cancel()
            await asyncio.wait([reader])
        left = time.monotonic()
        await engine.backend.pause()
        before = engine.backend.metrics()["inference/generated_tokens"]
        await engine.backend.resume()
        await asyncio.sleep(0.05)
        assert engine.backend.metrics()["inference/generated_tokens"] == before
        assert engine.backend.metrics()["inference/running"] == 0
        # The id is free again.
        assert (await engine.collect(GenerationRequest(request.request_id, [8], 2)))[-1].finish_reason == "length"
        return time.monotonic() - left

    assert engine.run(leave()) < 1.0


def test_a_wrong_digest_keeps_the_old_version(engine: Harness) -> None:
    async def mismatch() -> None:
        old, old_digest = engine.backend.version, engine.backend.digest
        sent = await engine.stage(old + 1)
        for version, wrong in ((old + 1, "0" * 64), (old + 2, sent), (old + 1, sent)):
            with pytest.raises(DigestMismatch):  # the last because the first dropped the stage
                await engine.backend.commit(version, wrong)
        await engine.stage(old + 1)
        await engine.backend.unstage()
        with pytest.raises(DigestMismatch):
            await engine.backend.commit(old + 1, sent)
        assert (engine.backend.version, engine.backend.digest) == (old, old_digest)
        request = engine.request()
        engine.check(request, await engine.collect(request))
        assert await engine.publish() == old + 1
        assert engine.backend.digest == sent

    engine.run(mismatch())


def test_an_incomplete_stage_is_refused(engine: Harness) -> None:
    version = engine.backend.version
    some = list(named_weights(engine.trained(99)))[:-1]
    with pytest.raises(WeightsError, match="missing"):
        engine.run(engine.backend.stage(version + 1, some))
    with pytest.raises(DigestMismatch):
        engine.run(engine.backend.commit(version + 1, digest(some)))
    request = engine.request()
    engine.check(request, engine.run(engine.collect(request)))


def test_stage_leaves_the_serving_weights_alone(engine: Harness) -> None:
    async def stage_while_generating() -> tuple[GenerationRequest, list[Chunk]]:
        request = engine.request([1, 2], 100)
        running = asyncio.ensure_future(engine.collect(request))
        await engine.generated(5)
        await engine.stage(engine.backend.version + 1)
        return request, await running

    request, chunks = engine.run(stage_while_generating())
    assert {chunk.version for chunk in chunks} == {engine.backend.version}
    engine.check(request, chunks)


def test_prefixes_are_recomputed_after_an_update(engine: Harness) -> None:
    prompt = [token % VOCAB for token in range(100)]
    for _ in range(2):
        for _ in range(2):
            request = engine.request(prompt, 4)
            engine.check(request, engine.run(engine.collect(request)))
        engine.run(engine.publish())


def test_stop_ends_requests_and_a_new_start_works(engine: Harness) -> None:
    async def stop() -> list[Chunk]:
        running = asyncio.ensure_future(engine.collect(engine.request([1], 400)))
        await engine.generated(3)
        await engine.backend.stop()
        await engine.backend.stop()
        with pytest.raises(BackendError, match="start"):
            await engine.collect(engine.request())
        return await running

    chunks = engine.run(stop())
    assert chunks[-1].finish_reason == "abort"
    assert chunks[-1].token_ids
    engine.run(engine.backend.start())
    engine.run(engine.publish())
    request = engine.request()
    engine.check(request, engine.run(engine.collect(request)))
