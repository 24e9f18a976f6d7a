"""A tied head is one tensor everywhere: in the log-prob kernel, in a checkpoint that holds both, in an export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_cases import PolicyLoss, make_batch, make_folder
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, build, documents, pack, predict

import archon
from archon.layout import Layout
from archon.models.config import ModelConfig
from archon.models.decoder import Decoder
from archon.weights import WeightsError, digest, load_folder, load_named, named_weights, read_folder, save_folder


def tied_folder(path: Path, family: str = "llama", head: torch.Tensor | str | None = None) -> Path:
    """A folder whose config ties the head; ``head`` is what it holds as ``lm_head.weight`` all the same."""
    build(family, tied=True).save_pretrained(path)
    if head is not None:
        tensors = load_file(path / "model.safetensors")
        copy = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"] = copy if isinstance(head, str) else head
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def load(folder: Path) -> Decoder:
    model = Decoder(ModelConfig.from_folder(folder))
    load_folder(model, folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_a_tied_model_use_and_train_the_embedding(family: str, tmp_path: Path) -> None:
    model = load(tied_folder(tmp_path / "model", family))
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert model.head_weight() is model.model.embed_tokens.weight
    batch = pack(documents(lengths=(5,)))
    never_read = torch.tensor([token for token in range(97) if token not in batch[0].tolist()])
    logprobs, _ = predict(model, batch, torch.arange(4))
    logprobs.sum().backward()
    # Only as a head can these rows get a gradient.
    assert model.model.embed_tokens.weight.grad[never_read].any(-1).all()


def test_a_checkpoint_with_both_equal_copies_is_one_tensor_afterwards(tmp_path: Path) -> None:
    folder = tied_folder(tmp_path / "both", head="copy")
    model = load(folder)
    names = [name for name, _ in named_weights(model)]
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    updated = [(name, tensor + 1) for name, tensor in named_weights(model)]
    load_named(model, updated)
    assert torch.equal(model.head_weight(), dict(updated)["model.embed_tokens.weight"])


@pytest.mark.parametrize("head", [torch.zeros(97, 32), torch.zeros(96, 32)], ids=["values", "shape"])
def test_a_checkpoint_whose_copies_differ_is_refused(head: torch.Tensor, tmp_path: Path) -> None:
    folder = tied_folder(tmp_path / "both", head=head)
    with pytest.raises(WeightsError, match=r"different from the embedding that the config ties it to: lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize("order", [1, -1], ids=["embedding_first", "head_first"])
def test_the_order_of_the_two_copies_does_not_matter(order: int, tmp_path: Path) -> None:
    tensors = list(read_folder(tied_folder(tmp_path / "both", head="copy")))[::order]
    model = Decoder(ModelConfig.from_folder(tmp_path / "both"))
    load_named(model, tensors)
    assert digest(named_weights(model)) == digest(named_weights(build("llama", tied=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_tied_model_predicts_the_same_in_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tied_folder(tmp_path / "source", family)
    model = load(source)
    save_folder(tmp_path / "export", named_weights(model), source)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    (sequence,) = documents(lengths=(9,))
    with torch.no_grad():
        logits = model(*pack([sequence])) @ model.head_weight().T
        torch.testing.assert_close(logits, theirs(sequence[None]).logits[0], atol=1e-5, rtol=1e-5)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
        load(tmp_path / "model")


# ---- a pipeline, whose last stage has a copy of the embedding


def exported(folder: Path, layout: str, schedule: str, path: Path) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Train, export from one engine and load into another; what every stage of it holds as embedding; its log-probs."""
    options = archon.Options(pp_schedule=schedule)
    settings = {"layout": layout, "dtype": "float32", "device": "cpu", "options": options}
    trained = archon.Engine.from_pretrained(folder, optimizer=archon.OptimizerConfig(lr=1e-2), **settings)
    for step in range(2):
        trained.train_step(make_batch(step, (5, 20, 37)), PolicyLoss())
    trained.save(path)
    trained.save(path.with_name("step"), "checkpoint")
    engine = archon.Engine.from_pretrained(folder, **settings)
    engine.load(path.with_name("step"))
    held = []
    for part in (*trained.model.parts.values(), *engine.model.parts.values()):
        if hasattr(part.model, "embed_tokens"):
            held.append(part.model.embed_tokens.weight.full_tensor().detach())
    return held, engine.forward(make_batch(9, (5, 20, 37))).logprobs


@pytest.mark.parametrize(
    ("layout", "schedule"), [("p2", "ZBVZeroBubble"), ("p2", "Interleaved1F1B"), ("p2t2", "1F1B"), ("p4", "1F1B")]
)
def test_a_tied_model_exported_from_a_pipeline_predicts_the_same_in_transformers(
    layout: str, schedule: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder, path = make_folder("tied", tmp_path), tmp_path / "export"
    by_rank = RankPool().run(exported, Layout.parse(layout).world_size, folder, layout, schedule, path)
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    copies = [copy for held, _ in by_rank for copy in held]
    assert len(copies) == 2 * 2 * Layout.parse(layout).tensor  # two engines, first and last stage
    assert all(torch.equal(copy, tensors["model.embed_tokens.weight"]) for copy in copies)
    theirs = AutoModelForCausalLM.from_pretrained(path).eval()
    batch, ours = make_batch(9, (5, 20, 37)), by_rank[0][1]
    assert ours is not None
    for sequence in range(batch.num_sequences):
        index = batch.token_index([sequence])
        ids, mask = batch.input_ids[index], batch.loss_mask[index]
        with torch.no_grad():
            logits = theirs(ids[None]).logits[0] / batch["temperature"][sequence]
        expected = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(ours[index][1:], expected * mask[1:], atol=1e-5, rtol=0)
