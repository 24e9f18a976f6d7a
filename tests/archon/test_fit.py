from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archon.layout import Layout
from archon.models.config import ModelConfig, MoEConfig, RopeConfig
from archon.options import Options
from archon.parallel.fit import LayoutMisfit, check_fit, nearest_layout

ROPE = RopeConfig(10_000.0)
DENSE = ModelConfig("llama", 252, 64, 180, 4, 4, 2, 16, 512, ROPE)
SPARSE = replace(DENSE, model_type="qwen3_moe", moe=MoEConfig(8, 2, 96, True, frozenset({0, 1, 2, 3})))
DENSE_FIRST = replace(SPARSE, moe=MoEConfig(8, 2, 96, True, frozenset({1, 2, 3})))
QWEN3_235B = ModelConfig(
    "qwen3_moe", 151936, 4096, 12288, 94, 64, 4, 128, 40960, ROPE, qk_norm=True,
    moe=MoEConfig(128, 8, 1536, True, frozenset(range(94))),
)  # fmt: skip
DEFAULT = Options()
INTERLEAVED = Options(pp_schedule="Interleaved1F1B")
ZERO_BUBBLE = Options(pp_schedule="InterleavedZeroBubble")
ZBV = Options(pp_schedule="ZBVZeroBubble")
OTHER_SCHEDULE = "or choose pp_schedule 1F1B or Interleaved1F1B"


@pytest.mark.parametrize(
    ("layout", "config", "options"),
    [
        ("d1", DENSE, DEFAULT),
        ("d4t2", DENSE, DEFAULT),
        # One key-value head per two ranks.
        ("d1t4", DENSE, DEFAULT),
        # More context ranks than heads, and a number that the heads do not divide by.
        ("d1t4c8", DENSE, DEFAULT),
        ("d2t2c3", DENSE, Options(context="ring")),
        # FSDP2 shards unevenly.
        ("d7r5", DENSE, DEFAULT),
        ("d1p4", DENSE, DEFAULT),
        # The outer stages hold the embedding and the head only.
        ("d1p3", DENSE, INTERLEAVED),
        ("d1p2", DENSE, ZBV),
        ("d1p3", DENSE, Options(pp_schedule="InterleavedZeroBubble", pp_layers_per_stage=1)),
        # A schedule means nothing without a pipeline.
        ("d4", DENSE, Options(pp_schedule="ZBVZeroBubble", ac_mode="selective", pp_layers_per_stage=1)),
        ("d2p2", DENSE, replace(ZBV, ac_mode="selective", selective_ac_option=2)),
        ("d2p2", DENSE, replace(ZBV, ac_mode="full", compile="inductor")),
        ("d1p2", DENSE, Options(compile="inductor", ac_mode="selective")),
        ("d2t2e4", SPARSE, DEFAULT),
        ("d2p2t2e4", DENSE_FIRST, DEFAULT),
        ("(attn:d2t2c2|ffn:t2e4)", SPARSE, DEFAULT),
        ("d512p8t1e64", QWEN3_235B, DEFAULT),
    ],
)
def test_layouts_that_fit(layout: str, config: ModelConfig, options: Options) -> None:
    check_fit(Layout.parse(layout), config, options)
    check_fit(Layout.parse(layout), config, options, world_size=Layout.parse(layout).world_size)


REFUSALS = [
    # Ranks.
    ("d4t2", DENSE, DEFAULT, 4, "layout d4t2: needs 8 processes, 4 are running; nearest layout that fits: d2t2"),
    ("d1", DENSE, DEFAULT, 2, "layout d1: needs 1 process, 2 are running; nearest layout that fits: d2"),
    ("d2", DENSE, DEFAULT, 1, "layout d2: needs 2 processes, 1 is running; nearest layout that fits: d1"),
    # Heads.
    (
        "d2t3", replace(DENSE, num_key_value_heads=1), DEFAULT, None,
        "layout d2t3: 4 attention heads do not divide by t3; nearest layout that fits: d3t2",
    ),
    (
        "d1t4", replace(DENSE, num_attention_heads=12, num_key_value_heads=6), DEFAULT, None,
        "layout d1t4: 6 key-value heads do not divide by t4, nor t4 by them; nearest layout that fits: d2t2",
    ),
    # Sizes.
    (
        "d1t4", replace(DENSE, vocab_size=254), DEFAULT, None,
        "layout d1t4: vocab_size 254 does not divide by t4; nearest layout that fits: d2t2",
    ),
    (
        "d1t4", replace(DENSE, intermediate_size=182), DEFAULT, None,
        "layout d1t4: intermediate_size 182 does not divide by t4; nearest layout that fits: d2t2",
    ),
    (
        "d1t4", replace(DENSE_FIRST, intermediate_size=182), DEFAULT, None,
        "layout d1t4: intermediate_size 182 does not divide by t4; nearest layout that fits: d2t2",
    ),
    # Experts.
    (
        "d4e2", DENSE, DEFAULT, None,
        "layout d4e2: e2 is for experts, and this llama model has none; nearest layout that fits: d4",
    ),
    (
        "(attn:d4|ffn:d1t2e2)", DENSE, DEFAULT, None,
        "layout (attn:d4|ffn:d1t2e2): e2 is for experts, and this llama model has none; "
        "ffn t2 is for experts, and this llama model has none; nearest layout that fits: (attn:d4|ffn:d4t1)",
    ),
    (
        "d12e6", SPARSE, DEFAULT, None,
        "layout d12e6: 8 experts do not divide by e6; nearest layout that fits: d12e4",
    ),
    (
        "(attn:d5t2|ffn:t5e2)", SPARSE, DEFAULT, None,
        "layout (attn:d5t2|ffn:d1t5e2): the experts' intermediate size 96 does not divide by ffn t5; "
        "nearest layout that fits: (attn:d5t2|ffn:d5t1e2)",
    ),
    # Layers.
    (
        "d1p8", DENSE, DEFAULT, None,
        "layout d1p8: 4 layers cannot fill 8 pipeline stages: the share of the last stage is 0, "
        "less than the 1 that pp_last_stage_less_layers takes from it; nearest layout that fits: d2p4",
    ),
    (
        "d2p4", DENSE, replace(ZBV, pp_first_stage_less_layers=0, pp_last_stage_less_layers=0), 8,
        "layout d2p4: 4 layers cannot fill 8 pipeline stages: stage 4 would hold none; nearest layout that fits: d4p2",
    ),
    (
        "d2p2", DENSE, Options(pp_schedule="Interleaved1F1B", pp_layers_per_stage=3), None,
        "layout d2p2: pp_layers_per_stage 3 makes 2 stages of 4 layers, "
        "but Interleaved1F1B over p2 needs 4 or a larger multiple of 2; nearest layout that fits: d4",
    ),
    # Options.
    (
        "d2p2", DENSE, replace(ZERO_BUBBLE, ac_mode="selective"), None,
        "layout d2p2: InterleavedZeroBubble does not run with ac_mode selective by op: recompute every n-th layer or "
        f"choose another ac_mode, {OTHER_SCHEDULE}; nearest layout that fits: d4",
    ),
    # Everything at once, in the order of the layout's letters.
    (
        "d8p8t8e64", SPARSE, DEFAULT, 64,
        "layout d8p8t8e64: needs 512 processes, 64 are running; 4 attention heads do not divide by t8; "
        "vocab_size 252 does not divide by t8; 8 experts do not divide by e64; "
        "4 layers cannot fill 8 pipeline stages: the share of the last stage is 0, "
        "less than the 1 that pp_last_stage_less_layers takes from it; nearest layout that fits: d4p4t4e8",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "config", "options", "world_size", "sentence"), REFUSALS)
def test_refusals_say_why_and_what_fits(
    layout: str, config: ModelConfig, options: Options, world_size: int | None, sentence: str
) -> None:
    with pytest.raises(LayoutMisfit) as error:
        check_fit(Layout.parse(layout), config, options, world_size=world_size)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("layout", "world_size", "nearest"),
    [
        # As near would be d4; another d comes first.
        ("d4t2", 4, "d2t2"),
        # As near would be d1t4, d1t2c2 and d1p2t2.
        ("d1t2", 4, "d2t2"),
        # Replicas stay where they can, and move as little as they must where they cannot.
        ("d4r2", 4, "d2r2"),
        ("d2r4", 4, "d1r4"),
        ("d4r3", 8, "d4r2"),
        # Experts keep their size as long as there are ranks to borrow.
        ("d8e8", 16, "d16e8"),
        ("d8e8", 4, "d4e4"),
        ("(attn:d8|ffn:t2e4)", 4, "(attn:d4|ffn:d1t2e2)"),
    ],
)
def test_nearest_layout_table(layout: str, world_size: int, nearest: str) -> None:
    assert str(nearest_layout(Layout.parse(layout), SPARSE, DEFAULT, world_size)) == nearest


def every_layout(world_size: int, replicas: int) -> Iterator[Layout]:
    """All layouts of so many ranks with so many replicas, found by trying every size."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for pipeline in sizes:
        for tensor in sizes:
            for context in sizes:
                data, left_over = divmod(world_size, replicas * pipeline * tensor * context)
                if not left_over:
                    for expert in sizes:
                        for expert_tensor in sizes:
                            if data * context * tensor % (expert * expert_tensor) == 0:
                                yield Layout(data, replicas, pipeline, tensor, context, expert, expert_tensor)


def fits(layout: Layout, config: ModelConfig, options: Options) -> bool:
    try:
        check_fit(layout, config, options)
    except LayoutMisfit:
        return False
    return True


def distance(a: Layout, b: Layout) -> float:
    names = ("data", "replicas", "pipeline", "tensor", "context", "expert", "expert_tensor")
    return sum(abs(math.log2(getattr(a, name) / getattr(b, name))) for name in names)


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.sampled_from([DENSE, SPARSE, DENSE_FIRST]),
    st.sampled_from([DEFAULT, INTERLEAVED, replace(ZBV, ac_mode="selective")]),
    st.lists(st.integers(1, 8), min_size=6, max_size=6),
    st.sampled_from([1, 2, 6, 8, 12]),
)
def test_no_fitting_layout_is_nearer(config: ModelConfig, options: Options, sizes: list[int], world_size: int) -> None:
    pipeline, tensor, context, expert, expert_tensor, data = sizes
    layout = Layout(data * expert * expert_tensor, 1, pipeline, tensor, context, expert, expert_tensor)
    nearest = nearest_layout(layout, config, options, world_size)
    check_fit(nearest, config, options, world_size=world_size)
    others = [other for other in every_layout(world_size, 1) if fits(other, config, options)]
    assert distance(nearest, layout) <= min(distance(other, layout) for other in others) + 1e-9


@pytest.mark.parametrize(("layout", "world_size"), [("d16r16p16t3e3", 4096), ("d32r7p8t3e3", 3600)])
def test_the_nearest_of_thousands_of_ranks_is_found_at_once(layout: str, world_size: int) -> None:
    start = time.process_time()
    with pytest.raises(LayoutMisfit):
        check_fit(Layout.parse(layout), QWEN3_235B, DEFAULT, world_size=world_size)
    assert time.process_time() - start < 0.5


def test_needs_no_torch() -> None:
    """The module is pure Python, so it makes no process group; ``import archon`` itself brings the engine."""
    code = (
        "import sys, types; archon = types.ModuleType('archon'); archon.__path__ = ['archon']; "
        "sys.modules['archon'] = archon; import archon.parallel.fit; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
