"""Episodes and workflows: exact tokens, masks with an owner, and stops, limits and failures by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from areal.inference.backend import BackendError, Chunk
from areal.models import load_tokenizer
from areal.rewards.pool import RewardPool
from areal.rollout.errors import RejectedPrompt
from areal.rollout.workflow import Episode, GenerationAborted, GenerationConfig
from areal.workflows import MultiTurnWorkflow, RLVRWorkflow

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny_qwen3_moe"
ROW = {"id": "r:0", "messages": [{"role": "user", "content": "Say cab."}], "answer": "cab"}


class ScriptedBackend:
    """Answers the requests it gets with given chunks, one list per request, and keeps the requests."""

    def __init__(self, *script: list[Chunk], max_model_len: int = 256) -> None:
        self.capabilities = SimpleNamespace(max_model_len=max_model_len)
        self.script = list(script)
        self.requests = []
        self.aborted: list[str] = []

    async def generate(self, request):
        self.requests.append(request)
        for chunk in self.script.pop(0):
            await asyncio.sleep(0)
            yield chunk

    async def abort(self, request_id=None):
        self.aborted.append(request_id)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


def answer(tokenizer, text: str, version: int = 0, end: bool = True, logprob: float = -0.5) -> list[Chunk]:
    """A completion in two chunks, as an engine whose weights changed between them would send it."""
    ids = tokenizer(text).input_ids + ([tokenizer.eos_token_id] if end else [])
    reason = "stop" if end else "length"
    return [
        Chunk(ids[:1], [logprob], version),
        Chunk(ids[1:], [2 * logprob] * (len(ids) - 1), version + 1, reason),
    ]


def exact(prompt, completion, prompt_ids, completion_ids, *, answer, **data):
    return float(completion == answer)


def run(tokenizer, backend, workflow, row=ROW, **options):
    async def scenario():
        pool = RewardPool(workers=1, timeout=10)
        gconfig = options.pop("gconfig", GenerationConfig(max_new_tokens=16, temperature=0.7))
        episode = Episode(backend, tokenizer, pool, gconfig, "p", "g", "g/0", order=(3, 1), **options)
        try:
            return await workflow.run(dict(row), episode=episode)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def test_single_turn_keeps_tokens_mask_logprobs_and_versions(tokenizer):
    backend = ScriptedBackend(answer(tokenizer, "cab", version=4))
    trajectory = run(tokenizer, backend, RLVRWorkflow(lambda *a, **data: exact(*a, **data)))
    prompt = tokenizer("Say cab.\n").input_ids
    completion = [*tokenizer("cab").input_ids, tokenizer.eos_token_id]
    assert trajectory.input_ids.tolist() == prompt + completion
    assert trajectory.loss_mask.tolist() == [False] * len(prompt) + [True] * 4
    assert trajectory.versions.tolist() == [-1] * len(prompt) + [4, 5, 5, 5]
    torch.testing.assert_close(trajectory.logprobs, torch.tensor([0.0] * len(prompt) + [-0.5, -1.0, -1.0, -1.0]))
    assert (trajectory.reward, trajectory.finish_reason, trajectory.temperature) == (1.0, "stop", 0.7)
    assert (trajectory.prompt_id, trajectory.group_id, trajectory.episode_id) == ("p", "g", "g/0")
    (request,) = backend.requests
    assert list(request.input_ids) == prompt and request.order == (3, 1, 0) and request.temperature == 0.7
    assert request.stop_token_ids == (tokenizer.eos_token_id,)
    assert backend.aborted == []


def test_the_reward_sees_the_row_and_text_without_special_tokens(tokenizer):
    def checks(prompt, completion, prompt_ids, completion_ids, *, id, messages, answer, level):
        seen = (prompt, completion, completion_ids[-1], id, messages[0]["content"], answer, level)
        return float(seen == ("Say cab.\n", "cab", 1, "r:0", "Say cab.", "cab", 9))

    trajectory = run(tokenizer, ScriptedBackend(answer(tokenizer, "cab")), RLVRWorkflow(checks), ROW | {"level": 9})
    assert trajectory.reward == 1.0


def test_multi_turn_extends_exact_tokens_and_discounts_a_late_success(tokenizer):
    backend = ScriptedBackend(answer(tokenizer, "ab", 0), answer(tokenizer, "b", 2), answer(tokenizer, "cab", 4))
    workflow = MultiTurnWorkflow(lambda *a, **d: exact(*a, **d), max_turns=4, turn_discount=0.5, feedback="No.")
    trajectory = run(tokenizer, backend, workflow)

    end = tokenizer.eos_token
    text = f"Say cab.\nab{end}No.\nb{end}No.\ncab{end}"
    assert trajectory.input_ids.tolist() == tokenizer(text).input_ids
    assert tokenizer.decode(trajectory.input_ids[trajectory.loss_mask]) == f"ab{end}b{end}cab{end}"
    assert trajectory.versions[trajectory.loss_mask].tolist() == [0, 1, 1, 2, 3, 4, 5, 5, 5]
    assert (trajectory.versions[~trajectory.loss_mask] == -1).all()
    assert trajectory.reward == 0.25 and trajectory.finish_reason == "stop"
    # what each turn was asked to continue is the prefix of what is trained, and the request numbers follow
    whole = trajectory.input_ids.tolist()
    assert [request.order for request in backend.requests] == [(3, 1, 0), (3, 1, 1), (3, 1, 2)]
    for request in backend.requests:
        assert list(request.input_ids) == whole[: len(request.input_ids)]


def test_multi_turn_stops_at_success_at_the_last_turn_and_at_a_full_context(tokenizer):
    def turns(*texts, max_turns=3, **options):
        backend = ScriptedBackend(*(answer(tokenizer, text) for text in texts), **options)
        workflow = MultiTurnWorkflow(lambda *a, **d: exact(*a, **d), max_turns=max_turns, feedback="No, try again.")
        return run(tokenizer, backend, workflow), len(backend.requests)

    trajectory, requests = turns("cab")
    assert (trajectory.reward, requests) == (1.0, 1)
    trajectory, requests = turns("a", "b", max_turns=2)
    assert (trajectory.reward, requests) == (0.0, 2)
    trajectory, requests = turns("a", max_model_len=20)  # 9 + 2 tokens used, the feedback has 15
    assert (trajectory.reward, requests, len(trajectory.input_ids)) == (0.0, 1, 11)


def test_a_turn_cut_by_length_is_closed_with_a_token_that_is_not_trained(tokenizer):
    backend = ScriptedBackend(answer(tokenizer, "ca", end=False), answer(tokenizer, "cab"))
    trajectory = run(tokenizer, backend, MultiTurnWorkflow(lambda *a, **d: exact(*a, **d), feedback="No."))
    assert trajectory.input_ids.tolist() == tokenizer("Say cab.\nca<eos>No.\ncab<eos>").input_ids
    assert tokenizer.decode(trajectory.input_ids[trajectory.loss_mask]) == "cacab<eos>"


def test_greedy_and_limits_reach_the_engine(tokenizer):
    gconfig = GenerationConfig(
        max_new_tokens=100, greedy=True, top_p=0.9, max_tokens=40, stop_token_ids=[7], stop=["!"]
    )
    backend = ScriptedBackend(answer(tokenizer, "cab"))
    run(tokenizer, backend, RLVRWorkflow(lambda *a, **d: 0.0), gconfig=gconfig)
    (request,) = backend.requests
    assert (request.top_k, request.top_p, request.max_new_tokens) == (1, 0.9, 31)
    assert request.stop_token_ids == tuple(sorted([1, 7, tokenizer("!").input_ids[0]]))


def test_a_stop_string_ends_the_text_and_stays_a_trained_token(tokenizer):
    ids = tokenizer("cab!").input_ids
    backend = ScriptedBackend([Chunk(ids, [-1.0] * 4, 0, "stop")])
    gconfig = GenerationConfig(stop=["!"])
    trajectory = run(tokenizer, backend, RLVRWorkflow(lambda *a, **d: exact(*a, **d)), gconfig=gconfig)
    assert trajectory.reward == 1.0 and trajectory.num_generated == 4


def test_a_stop_string_of_several_tokens_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"gconfig\.stop: 'END' is 3 tokens .* use gconfig\.stop_token_ids"):
        GenerationConfig(stop=["END"]).all_stop_token_ids(tokenizer)


@pytest.mark.parametrize(("limits", "limit"), [({"max_prompt_tokens": 8}, 8), ({}, 11)])
def test_a_prompt_that_does_not_fit_is_rejected_by_name(tokenizer, limits, limit):
    backend = ScriptedBackend(max_model_len=12)
    row = ROW | {"messages": [{"role": "user", "content": "Say abracadabra."}]}
    with pytest.raises(RejectedPrompt, match=rf"prompt p has 17 tokens, {limit} fit") as caught:
        run(tokenizer, backend, RLVRWorkflow(lambda *a, **d: 0.0), row, **limits)
    assert caught.value.reason == "prompt_too_long" and backend.requests == []


@pytest.mark.parametrize(
    ("chunks", "error", "words"),
    [
        ([Chunk([5], [-1.0], 0, "abort")], GenerationAborted, "aborted request g/0/0 after 1 tokens"),
        ([Chunk([5], [-1.0], 0)], BackendError, "without a finish reason"),
        ([Chunk([5], [], 0, "stop")], BackendError, "lacks log-probs"),
        ([Chunk([5], [-1.0], 0, "stop"), Chunk([6], [-1.0], 0, "stop")], BackendError, "after the last one"),
    ],
)
def test_an_engine_that_breaks_the_protocol_or_aborts_fails_the_episode(tokenizer, chunks, error, words):
    with pytest.raises(error, match=words):
        run(tokenizer, ScriptedBackend(chunks), RLVRWorkflow(lambda *a, **d: 0.0))


def test_a_cancelled_episode_aborts_its_request(tokenizer):
    class Endless(ScriptedBackend):
        async def generate(self, request):
            self.requests.append(request)
            while True:
                await asyncio.sleep(0.001)
                yield Chunk([5], [-1.0], 0)

    async def scenario():
        backend = Endless()
        episode = Episode(backend, tokenizer, RewardPool(1), GenerationConfig(), episode_id="e")
        task = asyncio.create_task(RLVRWorkflow("areal.rewards.numeric.reward").run(ROW, episode=episode))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return backend.aborted

    assert asyncio.run(scenario()) == ["e/0"]


def test_a_tokenizer_without_template_gets_plain_text(tokenizer):
    import copy

    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    backend = ScriptedBackend(answer(tokenizer, "b"), answer(tokenizer, "cab"))
    trajectory = run(plain, backend, MultiTurnWorkflow(lambda *a, **d: exact(*a, **d), feedback="No."))
    assert trajectory.input_ids.tolist() == tokenizer("Say cab.b<eos>\nNo.\ncab<eos>").input_ids


def test_many_concurrent_episodes_share_a_tokenizer_on_one_loop(tokenizer):
    async def scenario():
        pool = RewardPool(workers=2)
        workflow = RLVRWorkflow("areal.rewards.numeric.reward")

        async def episode(index: int) -> float:
            backend = ScriptedBackend(answer(tokenizer, f"it is {index}"))
            row = {"messages": [{"role": "user", "content": f"Say {index}."}], "answer": str(index - index % 2)}
            trajectory = await workflow.run(
                row, episode=Episode(backend, tokenizer, pool, GenerationConfig(), episode_id=str(index))
            )
            assert tokenizer.decode(trajectory.input_ids) == f"Say {index}.\nit is {index}<eos>"
            return trajectory.reward

        rewards = await asyncio.gather(*(episode(index) for index in range(64)))
        await pool.close()
        return rewards

    assert asyncio.run(scenario()) == [1.0, 0.0] * 32
