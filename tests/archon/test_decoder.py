"""The decoder beyond parity: rows, recomputation, initialisation and low-precision sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import FAMILIES, build, documents, pack, relative_error
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from archon.models.config import ModelConfig
from archon.models.decoder import Decoder
from archon.weights import digest, load_named, named_weights


def decoder(family: str = "qwen3_moe", **options: Any) -> Decoder:
    theirs = build(family, **options)
    model = Decoder(ModelConfig.from_hf_dict(theirs.config.to_dict()))
    load_named(model, named_weights(theirs))
    return model


def test_rows_choose_predictions_and_may_be_none_at_all() -> None:
    model = decoder()
    input_ids, _position_ids, _cu_seqlens = batch = pack(documents())
    targets, temperature = input_ids.roll(-1), torch.linspace(0.5, 1.5, len(input_ids))
    everything = torch.arange(len(input_ids))
    whole, _ = model(*batch, rows=everything, targets=targets, temperature=temperature)
    rows = torch.tensor([70, 3, 3, 41])
    some, entropy = model(*batch, rows=rows, targets=targets, temperature=temperature)
    assert entropy is None
    torch.testing.assert_close(some, whole[rows], atol=1e-6, rtol=0)
    nothing, _ = model(*batch, rows=rows[:0], targets=targets)
    nothing.sum().backward()
    assert nothing.shape == (0,)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_wrong_calls_are_refused() -> None:
    model = decoder("llama")
    batch = pack(documents(lengths=(3,)))
    with pytest.raises(ValueError, match="rows without targets"):
        model(*batch, rows=torch.tensor([0]))
    with pytest.raises(TypeError, match="cast_forward_inputs=False"):
        model(*batch, rows=torch.tensor([0]), targets=batch[0], temperature=torch.ones(3).bfloat16())


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
    rows, targets = torch.arange(len(batch[0]) - 1), batch[0].roll(-1)
    temperature = torch.full((len(batch[0]),), 0.7)
    logprobs, entropy = model(*batch, rows=rows, targets=targets, temperature=temperature, with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    return {
        name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sharded_wrapping_keeps_fp32_and_computes_in_bf16(one_rank, tied: bool, recompute: bool) -> None:  # type: ignore[no-untyped-def]
    """Layers and root wrapped as a data-parallel engine wraps them: fp32 is unchanged, bf16 is within its tolerance."""
    batch = pack(documents())
    options = {"tied": tied, "initializer_range": 0.02}  # the usual one; larger weights amplify rounding
    expected = grads_of(decoder("qwen3", **options), batch)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 3e-2)):
        model = decoder("qwen3", **options)
        model.recompute = recompute
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in model.model.layers:
            fully_shard(layer, mesh=one_rank, mp_policy=policy)
        fully_shard(model, mesh=one_rank, mp_policy=policy)
        assert digest(named_weights(model)) == digest(named_weights(decoder("qwen3", **options)))
        for name, grad in grads_of(model, batch).items():
            assert grad.dtype == torch.float32
            assert relative_error(grad, expected[name]) < tolerance, (name, relative_error(grad, expected[name]))


def test_sharded_parameters_are_loaded_and_streamed(one_rank) -> None:  # type: ignore[no-untyped-def]
    source, model = decoder(), decoder()
    model.init_weights()
    for layer in model.model.layers:
        fully_shard(layer, mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    load_named(model, named_weights(source))
    assert digest(named_weights(model)) == digest(named_weights(source))
