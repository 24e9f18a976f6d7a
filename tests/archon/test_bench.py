"""Layouts measured side by side: those that run, one that does not fit, one that dies, one that is late."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from archon.bench import Measurement, Workload, model_flops, parse_options, run
from archon.models.config import ModelConfig
from archon.options import Options
from archon.plan import count_parameters
from archon.processes import first_failure

MODEL = str(Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny_qwen3_moe")


def small(**changes: object) -> Workload:
    arguments = {"tokens": 128, "sequences": 4, "steps": 1, "warmup": 0, "dtype": "float32", "deadline": 120.0}
    return Workload(MODEL, **{**arguments, **changes})  # type: ignore[arg-type]


def in_background(layout: str, workload: Workload) -> tuple[threading.Thread, list[Measurement]]:
    found: list[Measurement] = []
    thread = threading.Thread(target=lambda: found.extend(run([layout], workload)), daemon=True)
    thread.start()
    return thread, found


def test_layouts_run_one_after_another() -> None:
    alone, shared, misfit = run(["d1", "d2", "d1t3"], small())
    assert alone.failure is shared.failure is None
    assert alone.loss == pytest.approx(shared.loss, rel=1e-5)
    assert alone.tokens == shared.tokens == 128 and alone.flops == shared.flops > 0
    assert len(shared.seconds) == 1 and shared.tokens_per_second == pytest.approx(128 / shared.seconds[0])
    assert len(shared.peak_memory_bytes) == 2 and min(shared.peak_memory_bytes) > 2**20
    assert misfit.failure is not None and "nearest layout that fits" in misfit.failure and not misfit.seconds

    # A layer's parameters are gathered for forward and for backward, those of embedding, norm and head once, and every
    # gradient is scattered, in fp32. What a step reports is gathered too: some hundred bytes.
    config = ModelConfig.from_folder(MODEL)
    parameter_bytes = 4 * count_parameters(config)
    outside_bytes = 4 * count_parameters(replace(config, num_hidden_layers=0, moe=None))
    assert alone.communication_bytes.get("all-gather", 0) == 0
    assert shared.communication_bytes["reduce-scatter"] == parameter_bytes
    assert 0 <= shared.communication_bytes["all-gather"] - (2 * parameter_bytes - outside_bytes) < 2000


def test_a_dead_rank_is_named_with_its_phase() -> None:
    thread, found = in_background("d2", small(steps=100_000))
    rank = started_rank(1)
    time.sleep(1.0)
    rank.send_signal(signal.SIGKILL)
    thread.join(30)
    assert not thread.is_alive()
    assert found[0].failure is not None
    assert found[0].failure.startswith("rank 1 died of SIGKILL in phase ")
    assert not children()


def test_a_late_layout_is_ended_with_what_each_rank_did() -> None:
    (late,) = run(["d2"], small(deadline=0.5, steps=100_000))
    assert late.failure is not None
    assert (
        late.failure.startswith("not done in 0.5 s: rank 0 was in phase ") and "; rank 1 was in phase " in late.failure
    )
    assert not children()


def test_what_the_engine_refuses_is_the_reason() -> None:
    (refused,) = run(["d1"], small(options=Options(offload_params=True)))
    assert refused.failure is not None
    assert refused.failure.startswith("rank 0 raised ValueError in phase ")
    assert "offload_params moves parameters from an accelerator" in refused.failure


def test_the_cause_is_told_and_not_its_consequences() -> None:
    lost = {"failure": "lost a connection", "time": 1.0, "consequence": True}
    late = {"failure": "raised", "time": 3.0, "consequence": False}
    died = {"failure": "died", "time": 2.0, "consequence": False}
    assert first_failure([{}, lost, late, died]) == "rank 3 died"
    assert first_failure([{}, {}]) is None


def test_flops_of_a_model_by_hand() -> None:
    config = ModelConfig.from_folder(MODEL)
    attention = 128 * 4 * 32 * 2 + 128 * 2 * 32 * 2  # q and o; k and v
    experts = 2 * 3 * 128 * 128  # two of eight
    norms = 2 * 128 + 2 * 32
    active = 3 * (attention + experts + 128 * 8 + norms) + 128 + 100 * 128
    assert model_flops(config, [10, 30]) == 6 * active * 40 + 6 * 3 * 4 * 32 * (10**2 + 30**2)


def test_lengths_vary_and_add_up() -> None:
    lengths = small(tokens=1000, sequences=7).batch().lengths
    assert lengths.sum() == 1000 and lengths.min() < 90 and lengths.max() > 190


def test_options_are_read_as_they_are_written() -> None:
    read = parse_options(["pp_schedule=ZBVZeroBubble", "deterministic=true", "pp_layers_per_stage=2", "compile=null"])
    assert read == Options(pp_schedule="ZBVZeroBubble", deterministic=True, pp_layers_per_stage=2)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("pp_scedule=1F1B", "the names are context, pp_schedule"),
        ("deterministic", "write NAME=VALUE"),
        ("deterministic=yes", "it is True or False"),
        ("ac_memory_budget=half", "it is a share from 0 to 1"),
        ("pp_first_stage_less_layers=0.5", "it is a number of layers from 0"),
        ("pp_layers_per_stage=two", "pp_layers_per_stage"),
        ("context=rings", "it is one of ulysses, ring"),
    ],
)
def test_wrong_options_are_refused(assignment: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options([assignment])


@pytest.mark.parametrize("changes", [{"steps": 0}, {"tokens": 8}, {"sequences": 0}, {"dtype": "float16"}])
def test_wrong_workloads_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        small(**changes)


def children() -> list[psutil.Process]:
    """Ranks of a layout that run below this process."""
    return [child for child in psutil.Process(os.getpid()).children() if "archon.bench" in child.cmdline()]


def started_rank(rank: int) -> psutil.Process:
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        for child in children():
            if child.environ().get("RANK") == str(rank):
                return child
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} did not start")
