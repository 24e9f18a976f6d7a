from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archon.layout import Layout
from archon.options import Options, Schedule
from archon.parallel.stages import num_stages, rank_of_stage, stage_layers, stages_of_rank

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

# Layers, stages, fewer in the first, fewer in the last, layers that each stage then has.
BALANCE = [
    (4, 1, 1, 1, [4]),
    (1, 1, 3, 5, [1]),
    (4, 2, 0, 0, [2, 2]),
    (5, 2, 0, 0, [3, 2]),
    (1, 2, 1, 1, [1, 0]),
    (2, 2, 1, 1, [1, 1]),
    (3, 2, 1, 1, [2, 1]),
    (2, 4, 1, 1, [0, 1, 1, 0]),
    (4, 4, 1, 1, [1, 2, 1, 0]),
    (6, 4, 1, 1, [1, 2, 2, 1]),
    (4, 4, 0, 0, [1, 1, 1, 1]),
    (10, 4, 0, 2, [3, 3, 3, 1]),
    (10, 4, 2, 0, [1, 3, 3, 3]),
    # The layer counts of Qwen3-8B (36) and Qwen3-235B-A22B (94), which two fewer spread evenly.
    (36, 4, 1, 1, [9, 10, 9, 8]),
    (94, 8, 1, 1, [11, 12, 12, 12, 12, 12, 12, 11]),
    (94, 16, 1, 1, [5, *[6] * 14, 5]),
]


@pytest.mark.parametrize(("layers", "stages", "first", "last", "sizes"), BALANCE)
def test_balance_table(layers: int, stages: int, first: int, last: int, sizes: list[int]) -> None:
    held = stage_layers(layers, stages, first, last)
    assert [len(stage) for stage in held] == sizes
    assert [layer for stage in held for layer in stage] == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last", "sentence"),
    [
        (
            2,
            5,
            1,
            1,
            "2 layers cannot fill 5 pipeline stages: the share of the last stage is 0, "
            "less than the 1 that pp_last_stage_less_layers takes from it",
        ),
        (
            4,
            4,
            3,
            0,
            "4 layers cannot fill 4 pipeline stages: the share of the first stage is 2, "
            "less than the 3 that pp_first_stage_less_layers takes from it",
        ),
        (2, 4, 0, 0, "2 layers cannot fill 4 pipeline stages: stage 2 would hold none"),
        (1, 3, 0, 0, "1 layer cannot fill 3 pipeline stages: stage 1 would hold none"),
    ],
)
def test_stages_without_a_layer_are_refused(layers: int, stages: int, first: int, last: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        stage_layers(layers, stages, first, last)


@given(st.integers(1, 100), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_layers_are_held_once_in_order_and_evenly(layers: int, stages: int, first: int, last: int) -> None:
    try:
        held = stage_layers(layers, stages, first, last)
    except ValueError:
        assert layers + first + last < stages * (max(first, last) + 1)
        return
    assert [layer for stage in held for layer in stage] == list(range(layers))
    places = [len(stage) for stage in held]
    places[0] += first
    places[-1] += last
    assert max(places) - min(places) <= 1
    assert sorted(places, reverse=True) == places


@pytest.mark.parametrize(
    ("layout", "schedule", "layers_per_stage", "stages"),
    [
        ("d4", "ZBVZeroBubble", 3, 1),
        ("p2", "1F1B", None, 2),
        ("d2p4t2", "1F1B", None, 4),
        ("p2", "Interleaved1F1B", None, 4),
        ("p2", "InterleavedZeroBubble", None, 4),
        ("p4", "ZBVZeroBubble", None, 8),
        # 10 layers and the one that first and last stage each have fewer fill 12 places.
        ("p2", "Interleaved1F1B", 3, 4),
        ("p2", "Interleaved1F1B", 2, 6),
        ("p3", "InterleavedZeroBubble", 1, 12),
        ("p2", "1F1B", 6, 2),
        ("p2", "ZBVZeroBubble", 3, 4),
    ],
)
def test_number_of_stages(layout: str, schedule: Schedule, layers_per_stage: int | None, stages: int) -> None:
    options = Options(pp_schedule=schedule, pp_layers_per_stage=layers_per_stage)
    assert num_stages(Layout.parse(layout), 10, options) == stages


@pytest.mark.parametrize(
    ("schedule", "layers_per_stage", "sentence"),
    [
        (
            "Interleaved1F1B",
            5,
            "pp_layers_per_stage 5 makes 3 stages of 10 layers, "
            "but Interleaved1F1B over p2 needs 4 or a larger multiple of 2",
        ),
        (
            "InterleavedZeroBubble",
            12,
            "pp_layers_per_stage 12 makes 1 stage of 10 layers, "
            "but InterleavedZeroBubble over p2 needs 4 or a larger multiple of 2",
        ),
        ("ZBVZeroBubble", 2, "pp_layers_per_stage 2 makes 6 stages of 10 layers, but ZBVZeroBubble over p2 needs 4"),
        ("1F1B", 3, "pp_layers_per_stage 3 makes 4 stages of 10 layers, but 1F1B over p2 needs 2"),
    ],
)
def test_stages_that_a_schedule_cannot_run_are_refused(
    schedule: Schedule, layers_per_stage: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        num_stages(Layout(pipeline=2), 10, Options(pp_schedule=schedule, pp_layers_per_stage=layers_per_stage))


@pytest.mark.parametrize(
    ("schedule", "pipeline", "stages", "held"),
    [
        ("1F1B", 3, 3, [[0], [1], [2]]),
        ("Interleaved1F1B", 2, 4, [[0, 2], [1, 3]]),
        ("InterleavedZeroBubble", 2, 6, [[0, 2, 4], [1, 3, 5]]),
        ("ZBVZeroBubble", 1, 1, [[0]]),
        ("ZBVZeroBubble", 2, 4, [[0, 3], [1, 2]]),
        ("ZBVZeroBubble", 4, 8, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ],
)
def test_stages_of_ranks_table(schedule: Schedule, pipeline: int, stages: int, held: list[list[int]]) -> None:
    assert [stages_of_rank(schedule, rank, pipeline, stages) for rank in range(pipeline)] == held


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [1, 2, 3, 8])
def test_stages_lie_where_torch_looks_for_them(schedule: Schedule, pipeline: int) -> None:
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    stages = pipeline * (1 if schedule == "1F1B" else 2)
    theirs = generate_stage_to_rank_mapping(pipeline, stages, "v" if schedule == "ZBVZeroBubble" else "loop")
    assert {stage: rank_of_stage(schedule, stage, pipeline) for stage in range(stages)} == theirs
