"""Which layers a pipeline stage holds, and which rank holds a stage. Pure Python.

A stage is a run of consecutive layers; the first one also holds the embedding and the last one the final norm and the
head. Schedules that interleave give every rank several of them (virtual stages).
"""

from __future__ import annotations

from archon.layout import Layout
from archon.options import Options, Schedule

_STAGES_PER_RANK = {"1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}
_INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that run with any number of stages per rank from 2."""


def num_stages(layout: Layout, num_layers: int, options: Options) -> int:
    """Stages of the whole pipeline: 1 without one, else a multiple of p that ``options.pp_schedule`` can run.

    1F1B has one stage per rank and ZBVZeroBubble two. The interleaved schedules have two, or as many as
    ``options.pp_layers_per_stage`` makes of the layers and of those that the first and last stage have fewer.

    Raises:
        ValueError: ``pp_layers_per_stage`` makes a number of stages that the schedule cannot run.
    """
    pipeline, schedule, size = layout.pipeline, options.pp_schedule, options.pp_layers_per_stage
    stages = pipeline * _STAGES_PER_RANK[schedule]
    if pipeline == 1:
        return 1
    if size is None:
        return stages
    places = num_layers + options.pp_first_stage_less_layers + options.pp_last_stage_less_layers
    asked = -(-places // size)
    if asked == stages or (schedule in _INTERLEAVED and asked > stages and asked % pipeline == 0):
        return asked
    needed = f"{stages} or a larger multiple of {pipeline}" if schedule in _INTERLEAVED else f"{stages}"
    raise ValueError(
        f"pp_layers_per_stage {size} makes {_count(asked, 'stage')} of {_count(num_layers, 'layer')}, "
        f"but {schedule} over p{pipeline} needs {needed}"
    )


def stage_layers(num_layers: int, num_stages: int, first_less: int = 1, last_less: int = 1) -> list[range]:
    """Layers of each stage, in order.

    The first stage has ``first_less`` and the last ``last_less`` layers fewer than an even split of
    ``num_layers + first_less + last_less`` gives; what an even split leaves over goes to the early stages. So the first
    and the last stage may come to hold no layer, only the embedding or the head.

    Raises:
        ValueError: a stage between the first and the last would hold no layer, or one of those two fewer than none.
    """
    share, left_over = divmod(num_layers + first_less + last_less, num_stages)
    sizes = [share + (stage < left_over) for stage in range(num_stages)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    what = f"{_count(num_layers, 'layer')} cannot fill {num_stages} pipeline stages"
    for stage, name, less in ((0, "first", first_less), (-1, "last", last_less)):
        if sizes[stage] < 0:
            raise ValueError(
                f"{what}: the share of the {name} stage is {sizes[stage] + less}, "
                f"less than the {less} that pp_{name}_stage_less_layers takes from it"
            )
    if 0 in sizes[1:-1]:
        raise ValueError(f"{what}: stage {sizes.index(0, 1)} would hold none")
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def rank_of_stage(schedule: Schedule, stage: int, pipeline: int) -> int:
    """Pipeline rank, from 0 to ``pipeline - 1``, that holds ``stage``.

    Stages go round the ranks again and again; ZBVZeroBubble turns back at the last rank, so that its first rank also
    holds the last stage.
    """
    lap, rank = divmod(stage, pipeline)
    return pipeline - 1 - rank if schedule == "ZBVZeroBubble" and lap % 2 else rank


def stages_of_rank(schedule: Schedule, pipeline_rank: int, pipeline: int, num_stages: int) -> list[int]:
    """Stages that ``pipeline_rank`` holds, in the order of their layers."""
    return [stage for stage in range(num_stages) if rank_of_stage(schedule, stage, pipeline) == pipeline_rank]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")
