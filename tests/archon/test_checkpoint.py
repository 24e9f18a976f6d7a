"""Checkpoints: any layout reads what any other wrote, bit for bit; saving in the background; failing together."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from archon import blocks, checkpoint
from archon.checkpoint import CheckpointError

POOL = RankPool(4)

# Shape of each parameter and how tensor ranks split it; some have fewer rows than ranks, or a number that is uneven.
PARAMETERS: dict[str, tuple[tuple[int, ...], Placement]] = {
    "embed_tokens.weight": ((20, 6), Shard(0)),
    "q_proj.weight": ((12, 5), Shard(0)),
    "o_proj.weight": ((5, 12), Shard(1)),
    "experts.gate_up_proj": ((4, 2, 8, 3), Shard(2)),
    "norm.weight": ((3,), Replicate()),
    "router.weight": ((7, 5), Replicate()),
}
# World size, pipeline, replicas, data, tensor.
LAYOUTS = {
    "d1": (1, 1, 1, 1, 1),
    "d4": (4, 1, 1, 4, 1),
    "d2t2": (4, 1, 1, 2, 2),
    "t4": (4, 1, 1, 1, 4),
    "r2d2": (4, 1, 2, 2, 1),
    "r2t2": (4, 1, 2, 1, 2),
    "p2d2": (4, 2, 1, 2, 1),
    "d3": (3, 1, 1, 3, 1),
}


def whole(name: str) -> Tensor:
    shape, _ = PARAMETERS[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))


def holdings(layout: str, *, filled: bool) -> dict[str, Tensor]:
    """What this rank holds in a layout, as the engine does: parameters by FSDP2, Adam's moments wrapped like them."""
    world, pipeline, replicas, data, tensor = LAYOUTS[layout]
    names = sorted(PARAMETERS)
    model = nn.Module()
    if world > 1:
        axes = ("p", "r", "d", "t")
        mesh = init_device_mesh("cpu", (pipeline, replicas, data, tensor), mesh_dim_names=axes)
        if pipeline > 1:
            names = names[mesh.get_local_rank("p") :: pipeline]
    for name in names:
        value = whole(name) if filled else torch.full(PARAMETERS[name][0], torch.nan)
        if tensor > 1:
            value = distribute_tensor(value, mesh["t"], [PARAMETERS[name][1]], src_data_rank=None)
        model.register_parameter(name.replace(".", "/"), nn.Parameter(value))
    if world > 1:
        fully_shard(model, mesh=mesh["r", "d"] if replicas > 1 else mesh["d"])
    held: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        held[f"model.{name.replace('/', '.')}"] = parameter
        held[f"optimizer.exp_avg.{name.replace('/', '.')}"] = _like(parameter, lambda local: local * 0.5)
    held["optimizer.step"] = torch.tensor(3.0 if filled else 0.0)
    held["tokens"] = torch.arange(4) if filled else torch.zeros(4, dtype=torch.int64)
    held["bias"] = torch.full((2, 3), 0.1 if filled else 0.0, dtype=torch.bfloat16)
    held["empty"] = torch.zeros(0, 4)
    return held


def _like(parameter: Tensor, moment: Callable[[Tensor], Tensor]) -> Tensor:
    if not isinstance(parameter, DTensor):
        return moment(parameter.detach())
    local = moment(parameter.to_local().detach())
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
        run_check=False,
    )


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saved_by_rank(folder: Path, layout: str) -> list[str]:
    held = holdings(layout, filled=True)
    checkpoint.save(folder / layout, held, {"version": 7, "layout": layout})
    return [str(parameter.placements) for parameter in held.values() if isinstance(parameter, DTensor)]


def loaded_by_rank(folder: Path, layout: str, written: list[str]) -> list[str]:
    """Names that differ from what this rank should hold."""
    expected, wrong = holdings(layout, filled=True), []
    for writer in written:
        held = holdings(layout, filled=False)
        before = {name: tensor.data_ptr() for name, tensor in held.items() if not isinstance(tensor, DTensor)}
        state = checkpoint.load(folder / writer, held, strict_names="")
        assert state == {"version": 7, "layout": writer}
        wrong += [f"{writer}: {name}" for name, tensor in held.items() if not _bit_equal(tensor, expected[name])]
        assert all(held[name].data_ptr() == pointer for name, pointer in before.items()), "not filled in place"
    return wrong


def _bit_equal(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(local(found), local(expected))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same state from every layout."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for layout, (world, *_) in LAYOUTS.items():
        placements = POOL.run(saved_by_rank, world, folder, layout)
        # FSDP over tensor parallel on one dimension
        assert ("_StridedShard" in str(placements)) == (LAYOUTS[layout][-1] > 1)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_parity_of_what_any_layout_wrote(written: Path, layout: str) -> None:
    found = POOL.run(loaded_by_rank, LAYOUTS[layout][0], written, layout, list(LAYOUTS))
    assert found == [[]] * LAYOUTS[layout][0]


def test_layout_parity_without_a_process_group(written: Path, tmp_path: Path) -> None:
    assert not dist.is_initialized()
    assert saved_by_rank(tmp_path, "d1") == []
    assert loaded_by_rank(tmp_path, "d1", ["d1"]) == loaded_by_rank(written, "d1", list(LAYOUTS)) == []


def test_replicas_are_written_once(written: Path) -> None:
    sizes = {layout: sum(file.stat().st_size for file in (written / layout).glob("*.distcp")) for layout in LAYOUTS}
    values = sum(whole(name).nbytes for name in PARAMETERS)
    assert sizes["r2d2"] < sizes["d2t2"] + values  # both moments and parameters again would be twice that


# ---- saving in the background


def saved_in_the_background(folder: Path) -> tuple[bool, bool, list[str]]:
    group = dist.new_group(backend="gloo")
    replace, may_end = checkpoint.replace_folder, threading.Event()

    def held_back(work: Path, path: Path) -> None:
        assert may_end.wait(30)
        replace(work, path)

    checkpoint.replace_folder = held_back
    held = holdings("d2t2", filled=True)
    saving = checkpoint.save(folder / "step", held, {"version": 1}, group=group, wait=False)
    for tensor in held.values():
        local(tensor).zero_()
    dist.all_reduce(torch.ones(1))  # training goes on, with its own collectives
    early = saving.done(), checkpoint.is_checkpoint(folder / "step")
    with pytest.raises(TimeoutError, match=r"step has not ended after 0 s; waited 0.01 s"):
        saving.result(0.01)
    may_end.set()
    saving.result(30)
    expected, found = holdings("d2t2", filled=True), holdings("d2t2", filled=False)
    checkpoint.load(folder / "step", found)
    return (*early, [name for name in found if not _bit_equal(found[name], expected[name])])


def test_a_background_save_holds_the_values_of_its_start_though_training_goes_on(tmp_path: Path) -> None:
    assert POOL.run(saved_in_the_background, 4, tmp_path) == [(False, False, [])] * 4


def without_a_group(folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        checkpoint.save(folder / "step", {}, {}, wait=False)
    return str(error.value)


def test_a_background_save_of_several_ranks_needs_a_group(tmp_path: Path) -> None:
    assert all("pass group=dist.new_group" in said for said in POOL.run(without_a_group, 2, tmp_path))


def test_a_background_save_of_one_process(tmp_path: Path) -> None:
    weight, state = torch.ones(3), {"version": 1}
    saving = checkpoint.save(tmp_path / "step", {"weight": weight}, state, wait=False)
    weight.zero_()
    state["version"] = 2
    saving.result(30)
    assert saving.done()
    assert checkpoint.load(tmp_path / "step", {"weight": weight}) == {"version": 1}
    assert weight.tolist() == [1, 1, 1]


# ---- errors, the same on every rank


def with_one_full_disk(folder: Path, wait: bool) -> tuple[str, dict[str, Any], list[float], list[str]]:
    group = dist.new_group(backend="gloo")
    weight = torch.full((5000,), float(dist.get_rank()))
    name = f"weight.{dist.get_rank()}"
    checkpoint.save(folder / "step", {name: weight}, {"version": 1})
    if dist.get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    weight += 10
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(folder / "step", {name: weight}, {"version": 2}, group=group, wait=wait).result(30)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    state = checkpoint.load(folder / "step", {name: weight})
    return str(error.value), state, weight.unique().tolist(), [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_that_cannot_write_fails_all_and_the_old_checkpoint_stands(tmp_path: Path, wait: bool) -> None:
    for rank, (said, state, values, names) in enumerate(POOL.run(with_one_full_disk, 4, tmp_path, wait)):
        assert said.startswith(f"saving {tmp_path / 'step'}: rank 2: ") and "rank 1" not in said
        assert state == {"version": 1} and values == [rank] and names == ["step"]


def with_one_rank_failing(folder: Path, where: str) -> str:
    rank, tensors = dist.get_rank(), {"weight": torch.ones(1)}
    checkpoint.save(folder / "step", tensors, {})

    def refuse(*_: Any) -> None:
        raise OSError("refused")

    if where == "tensors" and rank == 1:
        tensors = {"weight": torch.ones(1, device="meta")}
    if where == "folder" and rank == 1:
        Path.is_dir = lambda self: False
    if where == "name" and rank == 0:
        checkpoint.replace_folder = refuse
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(folder / "step", tensors, {})
    return str(error.value)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("tensors", "rank 1: ValueError: weight is on the meta device"),
        ("folder", "rank 1: FileNotFoundError: rank 0 made "),
        ("name", "rank 0: OSError: refused"),
    ],
)
def test_a_step_that_fails_on_one_rank_fails_on_all(tmp_path: Path, where: str, said: str) -> None:
    for message in POOL.run(with_one_rank_failing, 2, tmp_path, where):
        assert message.startswith(f"saving {tmp_path / 'step'}: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_everything_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    before_the_name: set[int] = set()
    replace = checkpoint.replace_folder

    def watched(work: Path, path: Path) -> None:
        before_the_name.update(synced)
        replace(work, path)

    monkeypatch.setattr(checkpoint, "replace_folder", watched)
    checkpoint.save(tmp_path / "step", {"weight": torch.ones(1)}, {})
    files = [tmp_path / "step", *(tmp_path / "step").iterdir()]
    assert {path.name for path in files} == {"step", "state.json", ".metadata", "__0_0.distcp"}
    assert {path.stat().st_ino for path in files} <= before_the_name
    assert tmp_path.stat().st_ino in synced - before_the_name


def misfits(folder: Path) -> list[str]:
    rank = dist.get_rank()
    checkpoint.save(folder / "step", {"shared": torch.ones(2), f"own.{rank}": torch.ones(3)}, {})
    said = []
    for tensors, strict in (
        ({"shared": torch.ones(2), "other": torch.ones(1)} if rank else {}, None),
        ({"shared": torch.ones(2, 1) if rank else torch.ones(2)}, None),
        ({"shared": torch.ones(2, dtype=torch.float64)}, None),
        ({"shared": torch.ones(2), "own.0": torch.ones(3)}, "own."),
    ):
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(folder / "step", tensors, strict_names=strict)
        said.append(str(error.value))
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(folder / "step", {"shared": torch.ones(2 + rank)}, {})
    said.append(str(error.value))
    with pytest.raises(FileNotFoundError) as missing:
        checkpoint.load(folder / "absent", {})
    said.append(str(missing.value))
    checkpoint.load(folder / "step", {"shared": torch.ones(2)}, strict_names="shared")
    return said


def test_names_shapes_and_dtypes_that_do_not_fit_are_named_on_every_rank(tmp_path: Path) -> None:
    first, second = POOL.run(misfits, 2, tmp_path)
    assert first == second
    lacking, shape, dtype, left_over, unequal, absent = first
    start = f"loading {tmp_path / 'step'}: rank"
    assert lacking == f"{start} 1: ValueError: the checkpoint lacks other"
    assert shape == f"{start} 1: ValueError: shared is [2] torch.float32 in the checkpoint, [2, 1] torch.float32 here"
    assert "rank 0: ValueError: shared is [2] torch.float32 in the checkpoint, [2] torch.float64 here" in dtype
    assert left_over == f"{start} 0: ValueError: no rank asks for own.1, which the checkpoint holds"
    assert "shared is [3] torch.float32 on rank 1, [2] torch.float32 on another" in unequal
    assert absent == f"{tmp_path / 'absent'} holds no complete checkpoint on ranks [0, 1] (state.json is missing)"


def strange_tensors() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    said = []
    for placement in (Partial(), _StridedShard(0, split_factor=2)):
        tensor = DTensor.from_local(torch.ones(4), mesh, [placement], run_check=False)
        with pytest.raises(ValueError) as error:
            blocks.local_blocks({"weight": tensor})
        said.append(str(error.value))
    uneven = DTensor.from_local(
        torch.ones(1 + 2 * dist.get_rank()), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
    )
    with pytest.raises(ValueError) as error:
        blocks.local_blocks({"weight": uneven})
    return [*said, str(error.value)]


def test_tensors_that_are_not_one_block_per_rank_are_refused() -> None:
    partial, strided, uneven = POOL.run(strange_tensors, 2)[0]
    assert partial.startswith("weight is a sum over ranks that is still to be taken")
    assert "gives a rank rows that are not next to each other" in strided
    assert uneven.startswith("weight: this rank holds (1,) of (4,)") and uneven.endswith("would give it (2,)")
    with pytest.raises(ValueError, match="weight is on the meta device"):
        blocks.local_blocks({"weight": torch.ones(2, device="meta")})


def test_a_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        checkpoint.save(tmp_path / "step", {}, {"version": torch.ones(1)}, wait=False)
    assert list(tmp_path.iterdir()) == []
