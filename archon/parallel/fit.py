"""Does a model fit a layout? Every reason why not in plain sentences, and the nearest layout that does. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from archon.layout import Layout
from archon.models.config import ModelConfig
from archon.options import ZERO_BUBBLE, Options
from archon.parallel.stages import num_stages, stage_layers


class LayoutMisfit(ValueError):
    """Model, options or processes do not fit the layout; the message says why, and names the nearest that they fit."""


def check_fit(layout: Layout, config: ModelConfig, options: Options, *, world_size: int | None = None) -> None:
    """Return if the model can be spread like this; needs no process group.

    Attention heads, the vocabulary and the inner size of dense layers divide by t; key-value heads do too, or t divides
    by them and each is held by several ranks. Experts divide by e, and their inner size by the ffn t. Every pipeline
    stage but the first and the last has a layer. Any c fits, because context parallel goes around a ring of the ranks
    that the heads do not reach; any d and r fit, because FSDP2 shards unevenly where it must.

    Args:
        layout: how the model is to be spread.
        config: the model's shape.
        options: how the layout is to run.
        world_size: number of processes that run; None takes the layout's.

    Raises:
        LayoutMisfit: names every reason, and the nearest layout of that many processes that fits.
    """
    reasons = [
        *_world_reasons(layout, world_size),
        *_tensor_reasons(layout.tensor, config),
        *_expert_reasons(layout.expert, layout.expert_tensor, config),
        *_router_reasons(config, options),
        *_pipeline_reasons(layout.pipeline, config, options),
    ]
    if reasons:
        nearest = nearest_layout(layout, config, options, world_size or layout.world_size)
        raise LayoutMisfit(f"layout {layout}: {'; '.join(reasons)}; nearest layout that fits: {nearest}")


class _Sizes(NamedTuple):
    """Sizes of a layout, in the order by which the smaller of two equally near layouts is chosen."""

    replicas: int
    pipeline: int
    context: int
    tensor: int
    data: int
    expert: int
    expert_tensor: int


def nearest_layout(layout: Layout, config: ModelConfig, options: Options, world_size: int) -> Layout:
    """The layout of ``world_size`` ranks that the model fits and that is least far from ``layout``.

    Far is the sum over all axes of ``|log2(size / size in layout)|``. Of equally near ones it is one with another d,
    then one with the fewest other sizes. Replicas are kept where ``world_size`` divides by them. There always is such a
    layout: any model fits any number of data shards.
    """
    # Experts fold c, t and d (``dense[2:]``) and nothing else ties the axes to each other, so for every choice of dense
    # sizes the nearest fold that divides those ranks is the best one.
    here = _Sizes(**{name: getattr(layout, name) for name in _Sizes._fields})
    folds = sorted(_fitting_folds(config, world_size), key=lambda fold: (*_far(fold, here[-2:]), fold))

    def order(sizes: _Sizes) -> tuple[Fraction, bool, int, _Sizes]:
        distance, changed = _far(sizes, here)
        return distance, sizes.data == here.data, changed, sizes

    replicas = [layout.replicas] if world_size % layout.replicas == 0 else _divisors(world_size)
    nearest = min(
        (
            _Sizes(*dense, *next(fold for fold in folds if math.prod(dense[2:]) % math.prod(fold) == 0))
            for dense in _fitting_dense_sizes(config, options, world_size, replicas)
        ),
        key=order,
    )
    return Layout(**nearest._asdict(), hybrid=layout.hybrid)


def _fitting_dense_sizes(
    config: ModelConfig, options: Options, world_size: int, replicas: list[int]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Every fitting r, p, c, t, d of so many ranks."""
    stages = [p for p in _divisors(world_size) if not _pipeline_reasons(p, config, options)]
    tensors = [t for t in _divisors(world_size) if not _tensor_reasons(t, config)]
    for replica in replicas:
        for pipeline in stages:
            for tensor in tensors:
                shards, left_over = divmod(world_size, replica * pipeline * tensor)
                if not left_over:
                    for context in _divisors(shards):
                        yield replica, pipeline, context, tensor, shards // context


def _fitting_folds(config: ModelConfig, world_size: int) -> list[tuple[int, int]]:
    """Every fitting e and ffn t; always e1 with t1, which folds any ranks."""
    if config.moe is None:
        return [(1, 1)]
    experts = _divisors(math.gcd(world_size, config.moe.num_experts))
    return list(product(experts, _divisors(math.gcd(world_size, config.moe.intermediate_size))))


def _far(sizes: tuple[int, ...], here: tuple[int, ...]) -> tuple[Fraction, int]:
    """Two to the power of the distance, which unlike a sum of logarithms is exact, and how many sizes differ."""
    pairs = list(zip(sizes, here, strict=True))
    distance = Fraction(math.prod(max(pair) for pair in pairs), math.prod(min(pair) for pair in pairs))
    return distance, sum(ours != theirs for ours, theirs in pairs)


def _world_reasons(layout: Layout, world_size: int | None) -> list[str]:
    if world_size in (None, layout.world_size):
        return []
    needed = f"{layout.world_size} process" + ("es" if layout.world_size > 1 else "")
    return [f"needs {needed}, {world_size} {'are' if world_size != 1 else 'is'} running"]


def _tensor_reasons(tensor: int, config: ModelConfig) -> list[str]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    reasons = []
    if heads % tensor:
        reasons.append(f"{heads} attention heads do not divide by t{tensor}")
    if kv_heads % tensor and tensor % kv_heads:
        reasons.append(f"{kv_heads} key-value heads do not divide by t{tensor}, nor t{tensor} by them")
    if config.vocab_size % tensor:
        reasons.append(f"vocab_size {config.vocab_size} does not divide by t{tensor}")
    dense = config.num_hidden_layers - (len(config.moe.layers) if config.moe else 0)
    if dense and config.intermediate_size % tensor:
        reasons.append(f"intermediate_size {config.intermediate_size} does not divide by t{tensor}")
    return reasons


def _expert_reasons(expert: int, expert_tensor: int, config: ModelConfig) -> list[str]:
    moe, reasons = config.moe, []
    if moe is None:
        sizes = [f"e{expert}"] * (expert > 1) + [f"ffn t{expert_tensor}"] * (expert_tensor > 1)
        return [f"{size} is for experts, and this {config.model_type} model has none" for size in sizes]
    if moe.num_experts % expert:
        reasons.append(f"{moe.num_experts} experts do not divide by e{expert}")
    if moe.intermediate_size % expert_tensor:
        reasons.append(
            f"the experts' intermediate size {moe.intermediate_size} does not divide by ffn t{expert_tensor}"
        )
    return reasons


def _router_reasons(config: ModelConfig, options: Options) -> list[str]:
    names = ("moe_router_bias_update_rate", "moe_aux_loss_coeff", "moe_z_loss_coeff")
    asked = [name for name in names if getattr(options, name)]
    return [f"{name} is set and the model has no experts: leave it out" for name in asked if config.moe is None]


def _pipeline_reasons(pipeline: int, config: ModelConfig, options: Options) -> list[str]:
    if pipeline == 1:
        return []
    reasons, schedule = [], options.pp_schedule
    first_less, last_less = options.pp_first_stage_less_layers, options.pp_last_stage_less_layers
    try:
        stages = num_stages(Layout(pipeline=pipeline), config.num_hidden_layers, options)
        stage_layers(config.num_hidden_layers, stages, first_less, last_less)
    except ValueError as error:
        reasons.append(str(error))
    if schedule in ZERO_BUBBLE and options.reshard_after_forward == "always":
        # The weights' gradients come after the inputs', when these parameters are gone.
        reasons.append(
            f"{schedule} does not run with reshard_after_forward always: leave it at default, or choose pp_schedule "
            "1F1B or Interleaved1F1B"
        )
    if schedule in ZERO_BUBBLE and options.ac_mode == "selective" and options.selective_ac_option == "op":
        # Its backward goes through the graph twice, and what this recomputation keeps is there once.
        reasons.append(
            f"{schedule} does not run with ac_mode selective by op: recompute every n-th layer or choose another "
            "ac_mode, or choose pp_schedule 1F1B or Interleaved1F1B"
        )
    return reasons


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
