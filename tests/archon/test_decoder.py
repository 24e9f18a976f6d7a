"""The decoder beyond parity: rows, recomputation, initialisation and low-precision sharding."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import FAMILIES, build, documents, ours_from, pack, predict, relative_error
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from archon.models.config import ModelConfig
from archon.models.decoder import Decoder, Head
from archon.options import Options
from archon.parallel.recompute import layer_activation_bytes, plan_recompute
from archon.weights import digest, load_named, named_weights


def test_rows_choose_predictions_and_may_be_none_at_all() -> None:
    model = ours_from(build("qwen3_moe"))
    batch = pack(documents())
    tokens = len(batch[0])
    targets, temperature = batch[0].roll(-1), torch.linspace(0.5, 1.5, tokens)
    whole = model(*batch, head=Head(torch.arange(tokens), targets, temperature, ("entropy", "logprobs")))
    assert whole.shape == (2, tokens) and whole.dtype == torch.float32
    rows = torch.tensor([70, 3, 41])
    (some,) = model(*batch, head=Head(rows, targets[rows], temperature[rows]))
    expected = torch.zeros(tokens).index_put((rows,), whole[1, rows])  # 0 where nobody asks
    torch.testing.assert_close(some, expected, atol=1e-6, rtol=0)
    nothing = model(*batch, head=Head(rows[:0], targets[:0]))
    assert nothing.shape == (1, tokens) and not nothing.any()
    nothing.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_a_rounded_temperature_is_refused() -> None:
    model, batch = ours_from(build("llama")), pack(documents(lengths=(3,)))
    with pytest.raises(TypeError, match="cast_forward_inputs=False"):
        model(*batch, head=Head(torch.tensor([0]), batch[0][1:2], torch.ones(1).bfloat16()))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_drawn_as_the_config_says_and_by_the_generator(family: str) -> None:
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_hf_dict(build(family, hidden_size=64).config.to_dict()))
    model.to_empty(device="cpu")
    digests = []
    for seed in (0, 0, 1):
        model.init_weights(torch.Generator().manual_seed(seed))
        digests.append(digest(named_weights(model)))
    assert digests[0] == digests[1] != digests[2]
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            assert float(parameter.detach().std()) == pytest.approx(0.15, rel=0.1), name


@pytest.fixture
def one_rank(tmp_path):  # type: ignore[no-untyped-def]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def grads_of(model: Decoder, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    logprobs, entropy = predict(model, batch, torch.arange(len(batch[0]) - 1), 0.7, with_entropy=True)
    assert entropy is not None
    (logprobs.sum() + entropy.sum()).backward()
    return {
        name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        for name, parameter in model.named_parameters()
    }


EVERY_LAYER = dict.fromkeys(range(4), "layer")


@pytest.mark.parametrize(
    ("options", "planned"),
    [
        ({}, {}),
        ({"ac_mode": "full"}, EVERY_LAYER),
        ({"ac_mode": "selective"}, dict.fromkeys(range(4), "op")),
        ({"ac_mode": "selective", "selective_ac_option": 1}, EVERY_LAYER),
        ({"ac_mode": "selective", "selective_ac_option": 2}, {0: "layer", 2: "layer"}),
        ({"ac_mode": "selective", "selective_ac_option": 3}, {0: "layer", 3: "layer"}),
        ({"ac_mode": "selective", "selective_ac_option": 9}, {0: "layer"}),
        ({"ac_mode": "memory_budget", "ac_memory_budget": 1.0}, {}),
        ({"ac_mode": "memory_budget", "ac_memory_budget": 0.75}, {0: "layer"}),
        ({"ac_mode": "memory_budget", "ac_memory_budget": 0.74}, {0: "layer", 1: "layer"}),
        ({"ac_mode": "memory_budget", "ac_memory_budget": 0.0}, EVERY_LAYER),
    ],
    ids=str,
)
def test_what_each_option_recomputes(options: dict[str, Any], planned: dict[int, str]) -> None:
    config = ModelConfig.from_hf_dict(build("qwen3", num_hidden_layers=4).config.to_dict())
    assert plan_recompute(Options(**options), config) == planned


@pytest.mark.parametrize("budget", [0.05, 0.3, 0.5, 0.6, 0.8, 0.95])
def test_a_budget_recomputes_the_fewest_first_layers_that_meet_it(budget: float) -> None:
    """Where layers keep different amounts: dense ones and those with experts."""
    config = ModelConfig.from_hf_dict(build("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[0, 4]).config.to_dict())
    sizes = [layer_activation_bytes(config, 4, index) for index in range(6)]
    count = len(plan_recompute(Options(ac_mode="memory_budget", ac_memory_budget=budget), config))
    assert sum(sizes[count:]) <= budget * sum(sizes) < sum(sizes[count - 1 :])


RECOMPUTED = {
    "full": {"ac_mode": "full"},
    "op": {"ac_mode": "selective"},
    "second": {"ac_mode": "selective", "selective_ac_option": 2},
    "budget": {"ac_mode": "memory_budget", "ac_memory_budget": 0.4},
}


@pytest.mark.parametrize("options", RECOMPUTED.values(), ids=RECOMPUTED.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_changes_no_gradient(family: str, options: dict[str, Any]) -> None:
    theirs, batch = build(family), pack(documents())
    expected = grads_of(ours_from(theirs), batch)
    for name, grad in grads_of(ours_from(theirs, **options), batch).items():
        assert relative_error(grad, expected[name]) <= 1e-6, name


class OperationCounts(TorchDispatchMode):
    """How often each operation ran, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_by_op_backward_repeats_cheap_operations_and_no_product(family: str) -> None:
    theirs, batch = build(family), pack(documents())
    ran = {}
    for name in (None, "op", "full"):
        with OperationCounts() as operations:
            grads_of(ours_from(theirs, **RECOMPUTED.get(name, {})), batch)
        ran[name] = operations.counts
    products = [op for op in ran["full"] if op.endswith("mm") or op == "packed_attention"]
    repeated = [op for op in products if ran["full"][op] > ran[None][op]]
    assert any(op.endswith("mm") for op in repeated) and "packed_attention" in repeated
    assert {op: ran["op"][op] for op in products} == {op: ran[None][op] for op in products}
    assert ran[None]["silu"] < ran["op"]["silu"] == ran["full"]["silu"]


@pytest.mark.parametrize("ac_mode", ["none", "full", "selective"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sharded_wrapping_keeps_fp32_and_computes_in_bf16(one_rank, tied: bool, ac_mode: str) -> None:  # type: ignore[no-untyped-def]
    """Layers and root wrapped as a data-parallel engine wraps them: fp32 is unchanged, bf16 is within its tolerance."""
    batch = pack(documents())
    theirs = build("qwen3", tied=tied, initializer_range=0.02)  # the usual one; larger weights amplify rounding
    expected = grads_of(ours_from(theirs), batch)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 3e-2)):
        model = ours_from(theirs, ac_mode=ac_mode)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in model.model.layers.values():
            fully_shard(layer, mesh=one_rank, mp_policy=policy)
        fully_shard(model, mesh=one_rank, mp_policy=policy)
        assert digest(named_weights(model)) == digest(named_weights(theirs))
        for name, grad in grads_of(model, batch).items():
            assert grad.dtype == torch.float32
            assert relative_error(grad, expected[name]) < tolerance, (name, relative_error(grad, expected[name]))


def test_sharded_parameters_are_loaded_and_streamed(one_rank) -> None:  # type: ignore[no-untyped-def]
    source = build("qwen3_moe")
    model = ours_from(source)
    model.init_weights()
    for layer in model.model.layers.values():
        fully_shard(layer, mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    load_named(model, named_weights(source))
    assert digest(named_weights(model)) == digest(named_weights(source))
