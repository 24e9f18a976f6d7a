"""One rank of torchtitan for ``layouts_cpu.py``, run by a Python that has torchtitan: ``torchtitan_rank.py SETTINGS``.

torchtitan's Qwen3 with its own parallelisation, optimizer and clipping. Three things differ from its trainer, so that
it runs on a CPU and computes what the others do: the device is the CPU; attention is its SDPA module, causal over rows
that are one document each, as its flex and varlen backends do not train on a CPU; and gradients are summed
explicitly, because gloo has no scaled sum. Its balance bias is off, as are recomputation and compilation everywhere.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend

# ruff: noqa: E402
torch._utils._get_available_device_type = lambda: "cpu"  # what torchtitan asks for the device, at its import

import torchtitan.models.qwen3 as qwen3
from steps import measure
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer


def model_config(shape: dict[str, Any], sequence: int) -> Any:
    """torchtitan's configuration of the model whose Hugging Face configuration is ``shape``."""
    qwen3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    dim = shape["hidden_size"]
    common = {
        "n_layers": shape["num_hidden_layers"],
        "dim": dim,
        "n_heads": shape["num_attention_heads"],
        "n_kv_heads": shape["num_key_value_heads"],
        "head_dim": shape["head_dim"],
        "attn_backend": "sdpa",
        "rope": CosSinRoPE.Config(dim=shape["head_dim"], max_seq_len=sequence, theta=10_000.0),
    }
    if "num_experts" in shape:
        layers = qwen3._build_qwen3_moe_layers(
            moe_hidden_dim=shape["moe_intermediate_size"],
            num_experts=shape["num_experts"],
            top_k=shape["num_experts_per_tok"],
            moe_comm_backend="standard",
            **common,
        )
        for layer in layers:
            layer.moe.load_balance_coeff = None
    else:
        layers = qwen3._build_qwen3_layers(hidden_dim=shape["intermediate_size"], **common)
    vocabulary = shape["vocab_size"]
    return qwen3.Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=qwen3._qwen3_norm(dim),
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=qwen3._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )


def main() -> None:
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    sequence, degrees = settings["sequence"], settings["torchtitan"]
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
    training = TrainingConfig(seq_len=sequence, disable_cuda_graphs=True, mixed_precision_param=settings["dtype"])
    spec = ModelSpec(
        name="qwen3",
        flavor="same",
        model=model_config(settings["shape"], sequence),
        parallelize_fn=qwen3.parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    config = Trainer.Config(model_spec=spec, parallelism=parallelism, training=training)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    spec.model.update_from_config(config=config)
    torch.manual_seed(settings["seed"])
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=replace(config.compile, enable=False),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    for module in model.modules():
        if isinstance(module, ScaledDotProductAttention):
            module.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    optimizer = default_adamw(lr=1e-5).build(model_parts=[model])
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=settings["shape"]["vocab_size"]).build(
        compile_config=config.compile
    )

    ids = torch.tensor(settings["ids"]).view(-1, sequence)
    if dims.dp_enabled:
        batch = dims.get_mesh("batch")
        ids = ids.chunk(batch.size())[batch.get_local_rank()]
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    tokens = torch.tensor(settings["sequences"] * (sequence - 1))
    parameters = list(model.parameters())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss, _ = loss_fn(model(ids), labels, tokens)
        loss.backward()
        dist_utils.clip_grad_norm_(parameters, 1.0, foreach=True, ep_enabled=dims.ep_enabled)
        optimizer.step()
        value = loss.detach().clone()
        if dims.dp_enabled:
            dist.all_reduce(value, group=dims.get_mesh("batch").get_group())
        return float(value)

    measure(step, settings["steps"], versions={name: version(name) for name in ("torch", "torchtitan")})


if __name__ == "__main__":
    main()
