"""What a workflow gets to work with: an Episode, which generates, scores, and keeps the owner of every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from areal.inference.backend import Backend, BackendError, GenerationRequest
from areal.models import render
from areal.rewards.functions import RewardFunction
from areal.rewards.pool import RewardPool
from areal.rollout.errors import RejectedPrompt
from areal.rollout.trajectory import PROMPT_VERSION, FinishReason, Trajectory


class Workflow(Protocol):
    """What runs an episode: any object with this method.

    ``data`` is a row of the dataset; ``kwargs["episode"]`` is an Episode. Returns what is to be trained, or None to
    leave the episode out. What it raises fails the episode; RejectedPrompt drops the prompt.
    """

    async def run(self, data: dict[str, Any], **kwargs: Any) -> Trajectory | list[Trajectory] | None: ...


class GenerationAborted(BackendError):
    """The engine ended a request before the model did; what it had sampled is not a sample of the policy's answers."""


class PrefixMismatch(ValueError):
    """Tokens that should continue a conversation do not start with it."""


@dataclass(frozen=True)
class GenerationConfig:
    """How completions are sampled.

    Attributes:
        n_samples: completions per prompt, each in its own episode.
        max_new_tokens: of one generation.
        max_tokens: of prompt and completion together; None: what the engine holds.
        greedy: take the most probable token; log-probs stay those at ``temperature``.
        temperature, top_p, top_k: 1, 1 and 0 sample from the full distribution.
        stop_token_ids: end a completion, beside the tokenizer's end-of-sequence token; they are part of it.
        stop: strings that do the same; each must be one token of the tokenizer.
    """

    n_samples: int = 1
    max_new_tokens: int = 256
    max_tokens: int | None = None
    greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()

    def all_stop_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Everything that ends a completion, as tokens: sorted, without duplicates.

        Raises:
            ValueError: a stop string is not exactly one token. Cutting at a longer one would leave tokens behind it
                that were sampled and are not part of the answer.
        """
        ids = set(self.stop_token_ids)
        if tokenizer.eos_token_id is not None:
            ids.add(tokenizer.eos_token_id)
        for text in self.stop:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(tokens) != 1 or tokenizer.decode(tokens) != text:
                raise ValueError(
                    f"gconfig.stop: {text!r} is {len(tokens)} tokens of this tokenizer and only a single one can end a "
                    "completion; use gconfig.stop_token_ids, or cut the text in the reward function"
                )
            ids.add(tokens[0])
        return tuple(sorted(ids))


@dataclass(frozen=True)
class Generation:
    """One completion: its tokens, their log-probs and versions, and why it ended. A stop token is its last token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


@dataclass(eq=False)
class Transcript:
    """The tokens of a conversation and the owner of each: what the policy sampled, and what it was given.

    It only ever grows at its end, so what was sampled is what later turns see and what is trained.
    """

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"

    def give(self, token_ids: Sequence[int]) -> None:
        """Append tokens that nobody trains: a prompt, a user's message, a tool's result."""
        self.input_ids += token_ids
        self.loss_mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [PROMPT_VERSION] * len(token_ids)

    def give_up_to(self, input_ids: Sequence[int]) -> None:
        """Append what ``input_ids`` has beyond this transcript.

        Raises:
            PrefixMismatch: it does not start with this transcript, token by token.
        """
        length = len(self.input_ids)
        if list(input_ids[:length]) != self.input_ids:
            pairs = zip(self.input_ids, input_ids, strict=False)
            first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(length, len(input_ids)))
            raise PrefixMismatch(
                f"the prompt of the next turn differs from the {length} tokens so far at token {first}: a chat "
                "template that rewrites earlier turns cannot be continued token by token; use Episode.render_next"
            )
        self.give(input_ids[length:])

    def sample(self, generation: Generation) -> None:
        """Append what the policy sampled after exactly these tokens."""
        self.input_ids += generation.token_ids
        self.loss_mask += [True] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        self.versions += generation.versions
        self.finish_reason = generation.finish_reason


@dataclass(eq=False)
class Episode:
    """One run of a workflow on one prompt, on the asyncio loop that owns the backend, tokenizer and reward pool.

    Attributes:
        order: (place of the prompt, sample); with the number of the generation it orders all requests of a run.
        is_eval: held-out evaluation: nothing of it is trained.
        max_prompt_tokens: longer prompts are rejected; None: what the engine holds.
    """

    backend: Backend
    tokenizer: Any
    reward_pool: RewardPool
    gconfig: GenerationConfig
    prompt_id: str = ""
    group_id: str = ""
    episode_id: str = ""
    order: tuple[int, ...] = ()
    is_eval: bool = False
    max_prompt_tokens: int | None = None
    _generations: int = field(default=0, init=False)
    _stop_token_ids: tuple[int, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._stop_token_ids = self.gconfig.all_stop_token_ids(self.tokenizer)

    def render(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation, ready for the assistant's turn.

        Raises:
            RejectedPrompt: ``prompt_too_long``, beyond ``max_prompt_tokens`` or what the engine holds.
        """
        input_ids = render(self.tokenizer, messages)
        limit = min(self.max_prompt_tokens or self.max_tokens, self.max_tokens - 1)
        if len(input_ids) > limit:
            raise self._too_long(len(input_ids), limit)
        return input_ids

    def render_next(self, transcript: Transcript, content: str, role: str = "user") -> list[int]:
        """The tokens that follow a sampled turn: its end where the policy did not sample one, the next message, and the
        start of the assistant's next turn. The tokens so far are not touched.

        Raises:
            PrefixMismatch: the chat template does not say what follows an assistant's turn.
        """
        if self.tokenizer.chat_template is None:
            text = f"\n{content}\n"
        else:
            sampled = "Sampled-turn-0f2c."
            messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": sampled}]
            rendered = self.tokenizer.apply_chat_template(
                [*messages, {"role": role, "content": content}], tokenize=False, add_generation_prompt=True
            )
            _, found, text = rendered.partition(sampled)
            if not found or content.strip() not in text:
                raise PrefixMismatch(
                    f"the chat template does not render an assistant's turn followed by one of {role!r}"
                )
            end = self.tokenizer.eos_token
            if end and transcript.input_ids[-1] == self.tokenizer.eos_token_id:
                text = text.removeprefix(end)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def max_tokens(self) -> int:
        """Tokens that prompt and completion may have together."""
        return min(
            self.gconfig.max_tokens or self.backend.capabilities.max_model_len, self.backend.capabilities.max_model_len
        )

    def has_room(self, input_ids: Sequence[int]) -> bool:
        """Whether at least one more token fits."""
        return len(input_ids) < self.max_tokens

    async def generate(self, input_ids: Sequence[int], max_new_tokens: int | None = None) -> Generation:
        """Sample a continuation of exactly these tokens, of at most ``max_new_tokens`` or what there is room for.

        Raises:
            RejectedPrompt: ``prompt_too_long``: there is no room for a token.
            GenerationAborted: the engine ended the request; the tokens it had sampled are dropped.
            BackendError: the engine failed.
        """
        if not self.has_room(input_ids):
            raise self._too_long(len(input_ids), self.max_tokens - 1)
        request = GenerationRequest(
            request_id=f"{self.episode_id}/{self._generations}",
            input_ids=tuple(input_ids),
            max_new_tokens=min(max_new_tokens or self.gconfig.max_new_tokens, self.max_tokens - len(input_ids)),
            temperature=self.gconfig.temperature,
            top_p=self.gconfig.top_p,
            top_k=1 if self.gconfig.greedy else self.gconfig.top_k,
            stop_token_ids=self._stop_token_ids,
            order=(*self.order, self._generations),
        )
        self._generations += 1
        try:
            generation = await self._collect(request)
        except BaseException:  # cancelled, above all: nobody waits for the tokens any more
            await self.backend.abort(request.request_id)
            raise
        if generation.finish_reason == "abort":
            raise GenerationAborted(
                f"the engine aborted request {request.request_id} after {len(generation.token_ids)} tokens"
            )
        return generation

    async def _collect(self, request: GenerationRequest) -> Generation:
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason: FinishReason | None = None
        async for chunk in self.backend.generate(request):
            if len(chunk.token_ids) != len(chunk.logprobs) or reason is not None:
                raise BackendError(f"request {request.request_id}: a chunk lacks log-probs, or came after the last one")
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs
            versions += [chunk.version] * len(chunk.token_ids)
            reason = chunk.finish_reason
        if reason is None:
            raise BackendError(
                f"request {request.request_id} ended after {len(token_ids)} tokens without a finish reason"
            )
        return Generation(token_ids, logprobs, versions, reason)

    def text(self, token_ids: Sequence[int]) -> str:
        """Completion tokens as a reader sees them: without special tokens and without the stop token at the end."""
        if token_ids and token_ids[-1] in self._stop_token_ids:
            token_ids = token_ids[:-1]
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    async def reward(
        self,
        function: RewardFunction | str,
        prompt: str,
        completion: str,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        /,
        **data: Any,
    ) -> float:
        """The score of a completion, from the reward pool and within its deadline; see ``RewardPool.call``."""
        return await self.reward_pool.call(function, prompt, completion, list(prompt_ids), list(completion_ids), **data)

    def trajectory(
        self,
        prompt_ids: Sequence[int],
        generation: Generation,
        reward: float,
        *,
        turn: int = 0,
        parent: str | None = None,
    ) -> Trajectory:
        """One prompt and its completion as a trained sample."""
        transcript = Transcript()
        transcript.give(prompt_ids)
        transcript.sample(generation)
        return self.transcript_trajectory(transcript, reward, turn=turn, parent=parent)

    def transcript_trajectory(
        self, transcript: Transcript, reward: float, *, turn: int = 0, parent: str | None = None
    ) -> Trajectory:
        """A conversation of any number of turns as one trained sample; the mask has gaps where tokens were given."""
        return Trajectory(
            input_ids=torch.tensor(transcript.input_ids),
            loss_mask=torch.tensor(transcript.loss_mask),
            logprobs=torch.tensor(transcript.logprobs),
            versions=torch.tensor(transcript.versions),
            reward=reward,
            finish_reason=transcript.finish_reason,
            temperature=self.gconfig.temperature,
            prompt_id=self.prompt_id,
            group_id=self.group_id,
            episode_id=self.episode_id,
            turn=turn,
            parent=parent,
        )

    def _too_long(self, length: int, limit: int) -> RejectedPrompt:
        return RejectedPrompt(
            "prompt_too_long",
            f"prompt {self.prompt_id} has {length} tokens, {limit} fit: raise the dataset's max_length or "
            f"rollout.max_model_len ({self.backend.capabilities.max_model_len}), or drop the prompt",
        )
