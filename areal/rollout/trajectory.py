"""Trajectory: one trained sample, from generation to gradient, and its durable form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from safetensors.torch import load, save
from torch import Tensor

from archon.batch import PackedBatch

FinishReason = Literal["stop", "length", "abort", "tool"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "tool")
PROMPT_VERSION = -1
"""The version of tokens that no policy sampled."""


@dataclass(eq=False)
class Trajectory:
    """Tokens with an owner each: mask, behaviour log-prob and version, and where the sample came from.

    Attributes:
        input_ids: ``[T]`` int64, prompt and completion.
        loss_mask: ``[T]`` bool, True exactly where the policy sampled the token and it is to be trained.
        logprobs: ``[T]`` fp32 behaviour log-probs of the sampled tokens, 0 elsewhere.
        versions: ``[T]`` int32 version of the weights that sampled each token, -1 elsewhere.
        token_rewards: ``[T]`` fp32, mostly zero; the outcome reward is not repeated in it.
        reward: scalar outcome reward.
        finish_reason: why generation ended, as the engine said it.
        temperature: sampling temperature.
        prompt_id, group_id, episode_id: which prompt, which lease of it (samples compared with each other), which run.
        turn, parent: index in the episode, and the id of the trajectory this one extends, if any.
        lineage: of the run that sampled it; it grows when a recovery could not reproduce recorded weights.
        routed_experts: ``[T, L, K]`` int16 expert choices of the engine, or None.
        tensors: multimodal inputs by name.
    """

    input_ids: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    versions: Tensor
    reward: float
    finish_reason: FinishReason
    temperature: float = 1.0
    token_rewards: Tensor | None = None
    prompt_id: str = ""
    group_id: str = ""
    episode_id: str = ""
    turn: int = 0
    parent: str | None = None
    lineage: int = 0
    routed_experts: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.input_ids = torch.as_tensor(self.input_ids, dtype=torch.int64)
        self.loss_mask = torch.as_tensor(self.loss_mask, dtype=torch.bool)
        self.logprobs = torch.as_tensor(self.logprobs, dtype=torch.float32)
        self.versions = torch.as_tensor(self.versions, dtype=torch.int32)
        if self.token_rewards is None:
            self.token_rewards = torch.zeros(len(self.input_ids))
        self.token_rewards = torch.as_tensor(self.token_rewards, dtype=torch.float32)
        self.reward = float(self.reward)
        self.validate()

    def validate(self) -> None:
        """Raise ValueError unless every token has an owner."""
        length = len(self.input_ids)
        assert self.token_rewards is not None
        for name in ("loss_mask", "logprobs", "versions", "token_rewards"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {length} tokens")
        if length == 0 or self.loss_mask[0]:
            raise ValueError("a trajectory starts with at least one token that is not trained")
        if (self.versions[self.loss_mask] < 0).any():
            raise ValueError("a trained token carries no version: keep the version of every sampled token")
        if not torch.isfinite(torch.tensor(self.reward)):
            raise ValueError(f"reward is {self.reward}; a reward is a finite number")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {self.finish_reason!r} is none of {', '.join(FINISH_REASONS)}")
        if self.routed_experts is not None and len(self.routed_experts) != length:
            raise ValueError(f"routed_experts has {len(self.routed_experts)} entries for {length} tokens")

    @property
    def id(self) -> str:
        """Unique in a run: the episode and the turn."""
        return f"{self.episode_id}/{self.turn}"

    @property
    def oldest_version(self) -> int | None:
        """Smallest version among the trained tokens; None if no token is trained."""
        trained = self.versions[self.loss_mask]
        return int(trained.min()) if len(trained) else None

    @property
    def newest_version(self) -> int | None:
        """Largest version among the trained tokens; None if no token is trained."""
        trained = self.versions[self.loss_mask]
        return int(trained.max()) if len(trained) else None

    @property
    def num_generated(self) -> int:
        return int(self.loss_mask.sum())

    def to_bytes(self) -> bytes:
        """Safetensors blob: tensors as tensors, the rest as JSON in its metadata."""
        tensors, plain = {}, {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                tensors[entry.name] = value.contiguous()
            elif entry.name == "tensors":
                tensors |= {f"tensors.{name}": tensor.contiguous() for name, tensor in value.items()}
            else:
                plain[entry.name] = value
        return save(tensors, metadata={"trajectory": json.dumps(plain)})

    @classmethod
    def from_bytes(cls, blob: bytes) -> Trajectory:
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        values = json.loads(header["__metadata__"]["trajectory"])
        tensors = load(blob)
        extra = {name.removeprefix("tensors."): tensors.pop(name) for name in list(tensors) if "." in name}
        return cls(**(values | tensors), tensors=extra)


def pack(trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Lay trajectories end to end for training.

    Token columns: ``behaviour_logprobs`` (fp32), ``versions`` (int32), ``token_rewards`` (fp32), ``loss_mask``.
    Sequence columns: ``reward`` (fp32), ``temperature`` (fp32), ``group`` and ``episode`` (int64, equal for samples of
    one prompt group and of one episode), ``turn`` (int64), ``truncated`` (bool: the finish reason is ``length``).
    """
    groups: dict[str, int] = {}
    episodes: dict[str, int] = {}
    rows = [
        {
            "input_ids": t.input_ids,
            "loss_mask": t.loss_mask,
            "behaviour_logprobs": t.logprobs,
            "versions": t.versions,
            "token_rewards": t.token_rewards,
            "reward": torch.tensor(t.reward),
            "temperature": torch.tensor(t.temperature),
            "group": torch.tensor(groups.setdefault(t.group_id, len(groups))),
            "episode": torch.tensor(episodes.setdefault(t.episode_id, len(episodes))),
            "turn": torch.tensor(t.turn),
            "truncated": torch.tensor(t.finish_reason == "length"),
        }
        for t in trajectories
    ]
    return PackedBatch.from_sequences(
        rows, sequence_columns=("reward", "temperature", "group", "episode", "turn", "truncated")
    )
