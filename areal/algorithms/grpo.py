"""GRPO: clipped policy loss on group-normalised rewards, with the decoupled off-policy correction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from archon.batch import PackedBatch
from archon.losses import Loss, Metric, TokenOutputs
from archon_kernels.policy_loss import PolicyLoss, masked_policy_loss
from areal.algorithms.advantages import generalized_advantages, overlong_penalty, place_rewards, scale_rewards
from areal.algorithms.aggregation import AGGREGATIONS, Aggregation, aggregate, denominator, trained_per_sequence
from areal.algorithms.normalize import NormSpec, normalize
from areal.algorithms.proximal import PROXIMAL_METHODS, ProximalMethod, loglinear_logprobs
from areal.algorithms.rejection import Correction, RejectionSampling, off_policy_correction

Spec = TypeVar("Spec")


@dataclass(kw_only=True)
class GRPOLoss:
    """The GRPO loss (arXiv 2402.03300) as a ``LossFn``; its arguments are the keys of the ``actor`` section.

    Reads the columns of ``areal.rollout.trajectory.pack``. With the decoupled loss, ``recompute`` also reads
    ``prox_logprobs [T]``; the other methods read ``current_version [N]``, which the engine adds: completed steps, plus
    the fraction of this step's optimizer updates that are done. ``prepare`` adds ``advantages [T]`` and
    ``shaped_reward [N]``.

    Without the decoupled loss the ratio is taken to the behaviour log-probs. With it, it is taken to the proximal ones,
    and each token is weighed by exp(p - b), shaped by ``rejection_sampling``.

    Attributes:
        eps_clip, eps_clip_higher, c_clip: see ``masked_policy_loss``.
        reward_bias, reward_scaling, reward_clip: ``clip((R + bias) * scaling)``, after the overlong penalty.
        reward_norm, adv_norm: ``NormSpec`` or its arguments; None for no normalisation. Rewards are normalised over
            episodes, advantages over trained tokens.
        overlong_reward_penalty, overlong_tokens, overlong_penalty_factor, max_new_tokens: see ``overlong_penalty``.
        mask_no_eos_with_zero: a truncated trajectory gets the shaped reward 0.
        discount, gae_lambda: see ``generalized_advantages``.
        use_decoupled_loss, prox_logp_method, rejection_sampling: off-policy correction (arXiv 2505.24298).
        loss_aggregation: ``token_mean``, ``sequence_mean`` or ``constant`` (needs ``max_new_tokens``).
        entropy_coef: weight of the entropy bonus; entropy is computed, and reported, only when it is not 0.

    Raises:
        ValueError: a value outside its range, or options that do not go together.
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    reward_bias: float = 0.0
    reward_scaling: float = 1.0
    reward_clip: float = 20.0
    reward_norm: NormSpec | dict[str, Any] | None = None
    adv_norm: NormSpec | dict[str, Any] | None = None
    overlong_reward_penalty: bool = False
    overlong_tokens: int | None = None
    overlong_penalty_factor: float | None = None
    max_new_tokens: int | None = None
    mask_no_eos_with_zero: bool = False
    discount: float = 1.0
    gae_lambda: float = 1.0
    use_decoupled_loss: bool = False
    prox_logp_method: ProximalMethod = "recompute"
    rejection_sampling: RejectionSampling | dict[str, Any] | None = None
    loss_aggregation: Aggregation = "token_mean"
    entropy_coef: float = 0.0
    outputs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._reward_norm = _build(NormSpec, self.reward_norm)
        self._adv_norm = _build(NormSpec, self.adv_norm)
        self._rejection = _build(RejectionSampling, self.rejection_sampling)
        self.outputs = ("logprobs", "entropy") if self.entropy_coef else ("logprobs",)
        self._validate()

    def _validate(self) -> None:
        if not 0 <= self.eps_clip <= 1:
            raise ValueError(f"eps_clip is {self.eps_clip}; the ratio is clipped at 1 - eps_clip, so it is in [0, 1]")
        if self.eps_clip_higher is not None and self.eps_clip_higher < 0:
            raise ValueError(f"eps_clip_higher is {self.eps_clip_higher}; it cannot be negative")
        if self.c_clip is not None and self.c_clip <= 1:
            raise ValueError(f"c_clip is {self.c_clip}; dual clipping needs a value above 1, or null")
        if self.reward_clip <= 0:
            raise ValueError(
                f"reward_clip is {self.reward_clip}; rewards are clipped to ±reward_clip, so it is positive"
            )
        for name in ("discount", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is in [0, 1]")
        if self.prox_logp_method not in PROXIMAL_METHODS:
            raise ValueError(
                f"prox_logp_method is {self.prox_logp_method!r}; it is one of {', '.join(PROXIMAL_METHODS)}"
            )
        if self.loss_aggregation not in AGGREGATIONS:
            raise ValueError(f"loss_aggregation is {self.loss_aggregation!r}; it is one of {', '.join(AGGREGATIONS)}")
        if self.loss_aggregation == "constant" and not self.max_new_tokens:
            raise ValueError("loss_aggregation: constant divides by max_new_tokens: set it")
        if self.rejection_sampling is not None and not self.use_decoupled_loss:
            raise ValueError("rejection_sampling shapes exp(p - b): set use_decoupled_loss: true, or remove it")
        if self.overlong_reward_penalty:
            for name in ("overlong_tokens", "overlong_penalty_factor", "max_new_tokens"):
                if not getattr(self, name):
                    raise ValueError(f"overlong_reward_penalty needs {name}, got {getattr(self, name)}")
            assert self.overlong_tokens is not None and self.max_new_tokens is not None
            if self.overlong_tokens > self.max_new_tokens:
                raise ValueError(
                    f"overlong_tokens {self.overlong_tokens} is above max_new_tokens {self.max_new_tokens}"
                )

    @torch.no_grad()
    def prepare(self, batch: PackedBatch) -> PackedBatch:
        """Rewards → shaped rewards → advantages, over the whole batch."""
        if self.use_decoupled_loss and self.prox_logp_method == "recompute" and "prox_logprobs" not in batch:
            raise ValueError(
                "prox_logp_method: recompute reads the column prox_logprobs: add the log-probs of a forward pass to "
                "the batch before the step, or set prox_logp_method to reuse or loglinear"
            )
        mask, owners, groups = batch.loss_mask, batch.sequence_ids, batch["group"]
        shaped = self._shape_rewards(batch)
        token_rewards = place_rewards(batch["token_rewards"], shaped, mask, owners)
        advantages = generalized_advantages(
            token_rewards, mask, owners, discount=self.discount, gae_lambda=self.gae_lambda
        )
        if self._adv_norm is not None:
            advantages = normalize(advantages, self._adv_norm, mask=mask, groups=groups[owners])
        return batch.with_tokens(advantages=advantages.float()).with_sequences(shaped_reward=shaped.float())

    def _shape_rewards(self, batch: PackedBatch) -> Tensor:
        """``[N]`` fp64."""
        rewards = batch["reward"].double()
        if self.overlong_reward_penalty:
            assert self.overlong_tokens and self.overlong_penalty_factor and self.max_new_tokens
            rewards = rewards + overlong_penalty(
                trained_per_sequence(batch),
                max_new_tokens=self.max_new_tokens,
                overlong_tokens=self.overlong_tokens,
                factor=self.overlong_penalty_factor,
            )
        rewards = scale_rewards(rewards, bias=self.reward_bias, scaling=self.reward_scaling, clip=self.reward_clip)
        if self._reward_norm is not None:
            rewards = normalize(rewards, self._reward_norm, groups=batch["group"], entries=batch["episode"])
        if self.mask_no_eos_with_zero:
            rewards = torch.where(batch["truncated"], 0.0, rewards)
        return rewards

    def denominator(self, batch: PackedBatch) -> Tensor:
        return denominator(batch, self.loss_aggregation, self.max_new_tokens)

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> Loss:
        assert outputs.logprobs is not None
        proximal = self._proximal_logprobs(outputs.logprobs.detach(), batch)
        correction = off_policy_correction(
            proximal, batch["behaviour_logprobs"], batch.loss_mask, batch.sequence_ids, self._rejection
        )
        kept = batch.loss_mask & ~correction.filtered
        policy = masked_policy_loss(
            outputs.logprobs,
            proximal,
            batch["advantages"],
            kept,
            eps_clip=self.eps_clip,
            eps_clip_higher=self.eps_clip_higher,
            c_clip=self.c_clip,
            weights_T=correction.weights,
        )
        policy_sum = aggregate(policy.loss_T, batch, self.loss_aggregation)
        metrics = {"loss/policy": (policy_sum.detach(), self.denominator(batch))}
        metrics |= self._metrics(policy, correction, batch)
        if not self.entropy_coef:
            return Loss(policy_sum, metrics)
        assert outputs.entropy is not None
        metrics["entropy/mean"] = _mean(outputs.entropy.detach(), batch.loss_mask)
        bonus = aggregate(outputs.entropy, batch, self.loss_aggregation)
        return Loss(policy_sum - self.entropy_coef * bonus, metrics)

    def _proximal_logprobs(self, logprobs: Tensor, batch: PackedBatch) -> Tensor:
        if not self.use_decoupled_loss:
            return batch["behaviour_logprobs"]
        if self.prox_logp_method == "recompute":
            return batch["prox_logprobs"]
        current = batch["current_version"][batch.sequence_ids]
        if self.prox_logp_method == "reuse":
            if (current != current.floor()).any():
                raise ValueError(
                    "prox_logp_method: reuse takes the weights being trained for those at the start of the step, "
                    "which holds for one optimizer update: set ppo_n_minibatches to 1 or use recompute"
                )
            return logprobs
        return loglinear_logprobs(
            logprobs,
            batch["behaviour_logprobs"],
            batch["versions"],
            proximal_version=current.floor(),
            current_version=current,
        )

    def _metrics(self, policy: PolicyLoss, correction: Correction, batch: PackedBatch) -> dict[str, Metric]:
        """Means as pairs, over trained tokens (ratios and clipping: over those kept) and over sequences that have one.

        KL estimates are k3: ``kl/approx`` compares l with p, ``kl/behaviour_proximal`` p with b, before any shaping.
        """
        mask = batch.loss_mask
        sampled = trained_per_sequence(batch) > 0
        metrics = {
            "ratio/mean": (policy.ratio, policy.kept),
            "kl/approx": (policy.kl, policy.kept),
            "clip/fraction": (policy.clipped, policy.kept),
            "advantage/mean": _mean(batch["advantages"], mask),
            "rejection/nonfinite": _mean(correction.nonfinite, mask),
            "reward/shaped": _mean(batch["shaped_reward"], sampled),
            "truncated/fraction": _mean(batch["truncated"], sampled),
        }
        if self.c_clip is not None:
            metrics["clip/dual_fraction"] = (policy.dual_clipped, policy.kept)
        if self.use_decoupled_loss:
            finite = mask & ~correction.nonfinite
            log_weights = correction.log_weights.double()
            metrics |= {
                "importance_weight/mean": _mean(log_weights.exp(), finite),
                "kl/behaviour_proximal": _mean(torch.expm1(log_weights) - log_weights, finite),
                "rejection/filtered_fraction": _mean(correction.filtered, mask),
                "rejection/clamped_fraction": _mean(correction.clamped, mask),
            }
        return metrics


def _build(kind: type[Spec], value: Spec | dict[str, Any] | None) -> Spec | None:
    return kind(**value) if isinstance(value, dict) else value


def _mean(values: Tensor, mask: Tensor) -> Metric:
    """(sum, count) of the values under the mask, in fp64."""
    return torch.where(mask, values.double(), 0.0).sum(), mask.sum(dtype=torch.float64)
