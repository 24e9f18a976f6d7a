"""Bytes sent, counted by hand: every operator, whoever calls it, and what FSDP adds to a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from archon.communication import CommunicationCounter


def point_to_point() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(3), 0)


def both_ways() -> None:
    peer = 1 - dist.get_rank()
    operations = [dist.P2POp(dist.isend, torch.ones(4), peer), dist.P2POp(dist.irecv, torch.ones(4), peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def uneven_exchange() -> None:
    """Rank 0 keeps 1 row and sends 3, rank 1 sends 2 and keeps none."""
    sent = [[1, 3], [2, 0]][dist.get_rank()]
    received = [[1, 2], [3, 0]][dist.get_rank()]
    dist.all_to_all_single(torch.empty(sum(received), 5), torch.ones(sum(sent), 5), received, sent)


def uneven_functional_exchange() -> None:
    sent, received = [[1, 3], [2, 0]][dist.get_rank()], [[1, 2], [3, 0]][dist.get_rank()]
    functional.all_to_all_single(torch.ones(sum(sent), 5), received, sent, dist.group.WORLD).sum().item()


def backward() -> None:
    """The gradient of an exchange is an exchange."""
    x = torch.ones(2, requires_grad=True)
    functional.all_to_all_single_autograd(x, [1, 1], [1, 1], dist.group.WORLD).sum().backward()


def redistribute() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None).redistribute(mesh, [Replicate()])


def sum_of_parts() -> None:
    """An operator on a DTensor, which communicates below this call."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None).sum().full_tensor()


def bfloat16_gather() -> None:
    dist.all_gather_into_tensor(torch.empty(8, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))


OPERATIONS: dict[str, tuple[Callable[[], object], dict[str, float]]] = {
    # What both of two ranks send; numbers are elements of 4 bytes.
    "gather": (lambda: dist.all_gather_into_tensor(torch.empty(8), torch.ones(4)), {"all-gather": 2 * 4 * 4}),
    "gather bf16": (bfloat16_gather, {"all-gather": 2 * 4 * 2}),
    "gather list": (lambda: dist.all_gather([torch.empty(4)] * 2, torch.ones(4)), {"all-gather": 2 * 4 * 4}),
    "scatter": (lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8)), {"reduce-scatter": 2 * 4 * 4}),
    "reduce": (lambda: dist.all_reduce(torch.ones(8)), {"all-reduce": 2 * 8 * 4}),
    "reduce one number": (lambda: dist.all_reduce(torch.ones(())), {"all-reduce": 2 * 4}),
    "exchange": (lambda: dist.all_to_all_single(torch.empty(6), torch.ones(6)), {"all-to-all": 2 * 3 * 4}),
    "uneven exchange": (uneven_exchange, {"all-to-all": (3 + 2) * 5 * 4}),
    "uneven functional exchange": (uneven_functional_exchange, {"all-to-all": (3 + 2) * 5 * 4}),
    "exchange and its backward": (backward, {"all-to-all": 2 * 2 * 1 * 4}),
    "send": (point_to_point, {"send/recv": 3 * 4}),
    "send both ways": (both_ways, {"send/recv": 2 * 4 * 4}),
    "broadcast": (lambda: dist.broadcast(torch.ones(4), 0), {"broadcast": 4 * 4}),
    "functional gather": (
        lambda: functional.all_gather_tensor(torch.ones(4), 0, dist.group.WORLD).sum().item(),
        {"all-gather": 2 * 4 * 4},
    ),
    "functional scatter": (
        lambda: functional.reduce_scatter_tensor(torch.ones(8), "sum", 0, dist.group.WORLD).sum().item(),
        {"reduce-scatter": 2 * 4 * 4},
    ),
    "functional reduce": (
        lambda: functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD).sum().item(),
        {"all-reduce": 2 * 8 * 4},
    ),
    "redistribute": (redistribute, {"all-gather": 2 * 4 * 4}),
    "sum of a DTensor": (sum_of_parts, {"all-reduce": 2 * 1 * 4}),
    "barrier": (dist.barrier, {}),
}


def count_operations() -> dict[str, dict[str, float]]:
    found = {}
    for name, (operation, _) in OPERATIONS.items():
        with CommunicationCounter() as counter:
            operation()
        found[name] = dict(counter.bytes)
    return found


@pytest.fixture(scope="module")
def counted(ranks: RankPool) -> list[dict[str, dict[str, float]]]:
    return ranks.run(count_operations, 2)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operator_counts_what_goes_to_other_ranks(name: str, counted: list[dict[str, dict[str, float]]]) -> None:
    expected = OPERATIONS[name][1]
    kinds = {kind for rank in counted for kind in rank[name]}
    assert {kind: sum(rank[name].get(kind, 0) for rank in counted) for kind in kinds} == expected


def count_larger_groups() -> dict[str, float]:
    """All-reduce of one number by three ranks, which send 4/3 of it each."""
    with CommunicationCounter() as counter:
        dist.all_reduce(torch.ones(()))
    return dict(counter.bytes)


def test_parts_of_a_byte_add_up(ranks: RankPool) -> None:
    sent = [rank["all-reduce"] for rank in ranks.run(count_larger_groups, 3)]
    assert sum(sent) == pytest.approx(2 * 2 * 4)


def count_fsdp_step(reshard: bool) -> dict[str, float]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # 72 parameters each
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    with CommunicationCounter() as counter:
        model(torch.ones(1, 8)).sum().backward()
    return dict(counter.bytes)


@pytest.mark.parametrize(("reshard", "gathers"), [(False, 1), (True, 2)])
def test_fsdp_gathers_parameters_and_scatters_gradients(ranks: RankPool, reshard: bool, gathers: int) -> None:
    for sent in ranks.run(count_fsdp_step, 2, reshard):
        assert sent == {"all-gather": gathers * 144 * 4 / 2, "reduce-scatter": 144 * 4 / 2}


def gather_to_one() -> None:
    with CommunicationCounter():
        dist.gather(torch.ones(1), [torch.ones(1)] * 2 if dist.get_rank() == 0 else None)


def test_operator_without_a_count_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="no count of the bytes that c10d.gather_.default sends"):
        ranks.run(gather_to_one, 2)
