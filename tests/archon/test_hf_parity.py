"""Every family equals transformers: logits, log-probabilities, entropies, values and all parameter gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, LENGTHS, ValueLoss, build, documents, ours_from, pack, predict, relative_error
from torch import Tensor

from archon import Engine, OptimizerConfig
from archon.batch import PackedBatch
from archon.models.config import ModelConfig
from archon.models.decoder import Decoder
from archon.weights import SCORE, load_named, named_weights, save_folder

TOLERANCE = 1e-5


def reference(theirs: Any, sequences: list[Tensor], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[T, V]``, log-probabilities and entropies ``[T - N]``, one sequence at a time."""
    logits = [theirs(sequence[None]).logits[0] for sequence in sequences]
    log_p = [torch.log_softmax(row[:-1].double() / temperature, -1) for row in logits]
    chosen = [p.gather(-1, sequence[1:, None]).squeeze(-1) for p, sequence in zip(log_p, sequences, strict=True)]
    entropy = [-(p.exp() * p).sum(-1) for p in log_p]
    return torch.cat(logits), torch.cat(chosen), torch.cat(entropy)


def predicting_rows(cu_seqlens: Tensor) -> Tensor:
    keep = torch.ones(int(cu_seqlens[-1]), dtype=torch.bool)
    keep[cu_seqlens[1:] - 1] = False
    return keep.nonzero().squeeze(1)


def assert_top_k_margin(theirs: Any, sequences: list[Tensor]) -> None:
    """Parity of a mixture of experts means something only where rounding cannot flip a choice."""
    for sequence in sequences:
        for logits in theirs(sequence[None], output_router_logits=True).router_logits:
            probs = logits.softmax(-1).sort(-1, descending=True).values
            top_k = theirs.config.num_experts_per_tok
            assert (probs[:, top_k - 1] - probs[:, top_k]).min() > 1e-4


@pytest.mark.parametrize("ac_mode", ["none", "full"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hf_parity_of_values_and_gradients_on_a_packed_batch(family: str, tied: bool, ac_mode: str) -> None:
    theirs = build(family, tied=tied)
    ours = ours_from(theirs, ac_mode=ac_mode)
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    sequences = documents()
    if family == "qwen3_moe":
        assert_top_k_margin(theirs, sequences)
    batch = pack(sequences)
    rows, temperature = predicting_rows(batch[2]), 0.7

    logits, chosen, entropy = reference(theirs, sequences, temperature)
    hidden = ours(*batch)
    torch.testing.assert_close(hidden @ ours.head_weight().T, logits, atol=TOLERANCE, rtol=TOLERANCE)
    logprobs, entropies = predict(ours, batch, rows, temperature, with_entropy=True)
    assert entropies is not None and logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), chosen, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(entropies.double(), entropy, atol=TOLERANCE, rtol=0)

    weights = torch.randn(len(rows), 2, generator=torch.Generator().manual_seed(2))
    (weights[:, 0] * chosen + weights[:, 1] * entropy).sum().backward()
    (weights[:, 0] * logprobs + weights[:, 1] * entropies).sum().backward()
    for name, parameter in ours.named_parameters():
        expected = theirs.get_parameter(name).grad
        assert relative_error(parameter.grad, expected) < TOLERANCE, name


@pytest.mark.parametrize("overrides", [{"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 4}], ids=str)
def test_hf_parity_of_llama_options(overrides: dict[str, Any]) -> None:
    assert_same_logits("llama", documents(), **overrides)


@pytest.mark.parametrize(
    "overrides",
    [{"norm_topk_prob": False}, {"decoder_sparse_step": 2, "mlp_only_layers": []}, {"num_experts_per_tok": 1}],
    ids=str,
)
def test_hf_parity_of_moe_options(overrides: dict[str, Any]) -> None:
    assert_same_logits("qwen3_moe", documents(), **overrides)


def test_hf_parity_of_a_router_whose_weights_are_applied_after_the_experts() -> None:
    """Scaling the input of an expert instead of its output would pass through the nonlinearity."""
    assert_same_logits("qwen3_moe", documents(lengths=(9,)), num_hidden_layers=1, mlp_only_layers=[])


def assert_same_logits(family: str, sequences: list[Tensor], **overrides: Any) -> None:
    theirs = build(family, **overrides)
    ours = ours_from(theirs)
    logits, *_ = reference(theirs, sequences, 1.0)
    with torch.no_grad():
        hidden = ours(*pack(sequences))
    torch.testing.assert_close(hidden @ ours.head_weight().T, logits, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (64, 2, 64, 2), (300, 7, 256, 3), LENGTHS], ids=str)
def test_hf_parity_over_lengths(lengths: tuple[int, ...]) -> None:
    assert_same_logits("qwen3", documents(lengths=lengths), max_position_embeddings=512)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 300.0},
        {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {},
    ],
    ids=["theta", "scaling", "parameters", "absent"],
)
def test_hf_parity_of_old_and_new_rope_keys(rope: dict[str, Any], tmp_path: Path) -> None:
    import json

    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps({**config, **rope}))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ours = Decoder(ModelConfig.from_folder(folder))
    load_named(ours, named_weights(theirs))
    logits, *_ = reference(theirs, documents(), 1.0)
    hidden = ours(*pack(documents()))
    torch.testing.assert_close(hidden @ ours.head_weight().T, logits, atol=TOLERANCE, rtol=TOLERANCE)


def critic(folder: Path, **options: Any) -> Engine:
    optimizer = OptimizerConfig(lr=1e-4, eps=1e-6, weight_decay=0.0)
    arguments = {"dtype": "float32", "device": "cpu", "max_tokens_per_mb": 70, **options}
    return Engine.from_pretrained(folder, optimizer=optimizer, is_critic=True, **arguments)


def critic_folder(folder: Path, family: str) -> Path:
    """The backbone of a tiny model with a score in place of a head."""
    model = build(family, tied=True)
    score = 0.2 * torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    save_folder(folder, [*named_weights(model), (SCORE, score)], model.config.to_dict())
    return folder


def batch_of(sequences: list[Tensor]) -> PackedBatch:
    return PackedBatch.from_sequences(
        [{"input_ids": ids, "loss_mask": torch.arange(len(ids)) % 3 > 0} for ids in sequences]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_hf_parity_of_a_critic(family: str, tmp_path: Path) -> None:
    """Values and a training step equal those of transformers' sequence classifier with one label."""
    from transformers import AutoModelForSequenceClassification

    ours = critic(critic_folder(tmp_path, family))
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.0)
    batch = batch_of(documents())
    outputs = ours.forward(batch, ("values", "last_value"))
    assert outputs.values is not None and outputs.last_value is not None
    metrics = ours.train_step(batch, ValueLoss())
    total = 0.0
    for number, sequence in enumerate(documents()):
        index = batch.token_index([number])
        values = theirs.score(theirs.model(sequence[None]).last_hidden_state)[0, :, 0]
        expected = torch.cat([torch.zeros(1), values[:-1]])
        torch.testing.assert_close(outputs.values[index], expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(outputs.last_value[number], values[-1], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(theirs(sequence[None]).logits[0, 0], values[-1])
        error = torch.where(batch.loss_mask[index], (expected - 1).square(), 0.0).sum()
        loss = (error + (values[-1] + 1).square()) / batch.loss_mask.sum()
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    optimizer.step()
    assert metrics["loss"] == pytest.approx(total, rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert dict(ours.model.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in ours.model.named_parameters():
        assert relative_error(parameter, theirs.get_parameter(name)) < TOLERANCE, name
    ours.save(tmp_path / "exported")
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter), name
    assert torch.equal(
        critic(tmp_path / "exported").forward(batch, ("values",)).values, ours.forward(batch, ("values",)).values
    )


def test_a_critic_in_bf16_keeps_its_values_in_fp32(tmp_path: Path) -> None:
    """Rounded to bf16, values near 1 would come in steps of 0.8 %, which is coarser than returns are fitted."""
    folder = critic_folder(tmp_path, "qwen3")
    found, expected = (
        critic(folder, dtype=dtype).forward(batch_of(documents()), ("values",)).values
        for dtype in ("bfloat16", "float32")
    )
    assert found is not None and expected is not None
    assert relative_error(found, expected) < 3e-2 and not torch.equal(found, found.bfloat16().float())
