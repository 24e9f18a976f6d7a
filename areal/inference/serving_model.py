"""A transformers causal LM without weights, and its log-probs of whole sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal.inference import paged_attention

_LOGITS_AT_ONCE = 2**26
"""Most logits of a scoring forward held at once (fp32, so 256 MiB)."""


def build_model(model_folder: Path, dtype: torch.dtype) -> Any:
    """The model that ``config.json`` describes, on the CPU, parameters uninitialised, heads tied as configured.

    No random number is drawn: the global generator belongs to the trainer.

    Raises:
        ValueError: the architecture needs more than full causal attention.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_folder).get_text_config()
    _check_attention(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=paged_attention.register(),
        )
    model.to(dtype)
    for name, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):
            model.set_submodule(name, type(module)(config=model.config))
    computed = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if computed:
        raise ValueError(f"{type(model).__name__} has buffers that the embedded engine cannot compute: {computed}")
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False))
    model.tie_weights()
    return model.eval()


def _check_attention(config: Any) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types == {"full_attention"} and getattr(config, "sliding_window", None) is None:
        return
    raise ValueError(
        f"the embedded engine serves full causal attention only; {config.model_type} has layers {sorted(layer_types)} "
        f"and sliding_window {getattr(config, 'sliding_window', None)}: choose a model without them"
    )


def stop_token_ids(model_folder: Path) -> frozenset[int]:
    """End-of-sequence ids of the folder: of its generation config, else of its model config."""
    from transformers import AutoConfig, GenerationConfig

    if (model_folder / "generation_config.json").exists():
        ids = GenerationConfig.from_pretrained(model_folder).eos_token_id
    else:
        ids = AutoConfig.from_pretrained(model_folder).get_text_config().eos_token_id
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize


@torch.no_grad()
def score(model: Any, sequences: Sequence[Sequence[int]], temperature: float, token_budget: int) -> list[list[float]]:
    """Log-prob of every token given those before it, 0 for the first of a sequence.

    Args:
        temperature: divides the logits.
        token_budget: tokens of one forward; a longer sequence runs alone.
    """
    results: list[list[float]] = [[0.0] * len(sequence) for sequence in sequences]
    for rows in _batches([len(sequence) for sequence in sequences], token_budget):
        lengths = [len(sequences[row]) for row in rows]
        ids = torch.tensor([token for row in rows for token in sequences[row]])
        positions = torch.cat([torch.arange(length) for length in lengths])
        # The logits at index i are of token i + 1.
        predicted = (positions != 0).nonzero()[:, 0] - 1
        logprobs = torch.zeros(len(ids))
        plan = paged_attention.plan_attention(lengths, lengths)
        for part in predicted.split(max(_LOGITS_AT_ONCE // model.config.vocab_size, 1)):
            output = model(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_plan=plan,
                use_cache=False,
                logits_to_keep=part,
            )
            logits: Tensor = output.logits[0].float() / temperature
            logprobs[part + 1] = logits.log_softmax(-1).gather(-1, ids[part + 1, None])[:, 0]
        for row, values in zip(rows, logprobs.split(lengths), strict=True):
            results[row] = values.tolist()
    return results


def _batches(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Rows in order of length, cut so that no batch exceeds the budget; empty rows are left out."""
    batch: list[int] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and tokens + lengths[row] > token_budget:
            yield batch
            batch, tokens = [], 0
        if lengths[row]:
            batch.append(row)
            tokens += lengths[row]
    if batch:
        yield batch
