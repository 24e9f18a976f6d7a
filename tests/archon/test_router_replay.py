"""Router replay (R3): recorded expert choices give back the run that made them, bit for bit, in every layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import Case, PolicyLoss, make_clear_batch, make_engine, make_folder
from rank_pool import RankPool
from torch import Tensor

import archon
from archon.batch import PackedBatch

LENGTHS = (2, 37, 5, 20, 8, 3)
MODELS = ("moe", "dense_first")
LAYOUTS = ("d2e2", "t2e2", "c2", "p2", "(attn:d2|ffn:t2)")
SPLIT = [
    *(("dense_first", layout) for layout in LAYOUTS),
    *(("moe", layout) for layout in ("d2e2", "p2")),
    *(pytest.param("moe", layout, marks=pytest.mark.slow) for layout in ("t2e2", "c2", "(attn:d2|ffn:t2)")),
]
CASES = [("dense_first", "d1"), ("moe", "d1"), *SPLIT]
EXPERTS, TOP_K, SPARSE, ALL = 8, 2, 3, 4  # of dense_first
BOTH = ("logprobs", "routed_experts")
Found = dict[str, Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {model: make_folder(model, parent) for model in MODELS}


@pytest.fixture(scope="module")
def found(ranks: RankPool, folders: dict[str, Path]) -> Callable[[str, str], Found]:
    """What ``replay`` found for a model in a layout, once."""
    batches = {model: ranks.run(clear_batch, 1, folders[model])[0] for model in MODELS}
    known: dict[tuple[str, str], Found] = {}

    def replayed(model: str, layout: str) -> Found:
        if (model, layout) not in known:
            case = Case(layout, model, budget=50)
            first, *others = ranks.run(replay, case.world_size, folders[model], case, batches[model])
            for other in others:
                assert all(torch.equal(other[name], tensor) for name, tensor in first.items())
            known[model, layout] = first
        return known[model, layout]

    return replayed


def clear_batch(folder: Path) -> PackedBatch:
    case = Case("d1", "", budget=sum(LENGTHS))
    return make_clear_batch(make_engine(folder, case), seed=0, lengths=LENGTHS)


def replay(folder: Path, case: Case, batch: PackedBatch) -> Found:
    """Log-probs, choices and weights after a step, of the model's own run and of several replays."""
    sgd = archon.OptimizerConfig(type="sgd", lr=0.1, weight_decay=0.0, gradient_clipping=0.0)
    engine = make_engine(folder, case, optimizer=sgd)
    own = engine.forward(batch, BOTH).routed_experts
    assert own is not None and engine.routers is not None
    missing = batch.sequence_ids % 2 == 0  # these sequences see nothing of the others
    columns: dict[str, Tensor | None] = {
        "own": None,
        "same": own,
        "all_layers": in_all_layers(own, engine.routers.layers, engine.config.num_hidden_layers),
        "none": torch.full_like(own, -1),
        "others": (own + 1) % EXPERTS,
        "others_or_none": torch.where(missing[:, None, None], -1, (own + 1) % EXPERTS),
        "narrow": own.to(torch.int8),
    }
    found: Found = {}
    for name, column in columns.items():
        given = batch if column is None else batch.with_tokens(routed_experts=column)
        outputs = engine.forward(given, BOTH)
        assert outputs.logprobs is not None and outputs.routed_experts is not None
        found[f"{name}/logprobs"], found[f"{name}/choices"] = outputs.logprobs, outputs.routed_experts
    for name in ("own", "same", "others"):
        column = columns[name]
        engine.load(folder)
        engine.train_step(batch if column is None else batch.with_tokens(routed_experts=column), PolicyLoss())
        found |= {f"{name}/after/{weight}": tensor.clone() for weight, tensor in engine.weights()}
    return found


def in_all_layers(choices_TLK: Tensor, sparse: list[int], num_layers: int) -> Tensor:
    """The choices in a column over all layers, with -1 at the dense ones."""
    column = choices_TLK.new_full((choices_TLK.shape[0], num_layers, choices_TLK.shape[2]), -1)
    column[:, sparse] = choices_TLK
    return column


def after(found: Found, name: str) -> Found:
    return {key: tensor for key, tensor in found.items() if key.startswith(f"{name}/after/")}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_replayed_choices_give_the_same_bits(found: Callable[[str, str], Found], model: str, layout: str) -> None:
    results = found(model, layout)
    for name in ("same", "all_layers", "none", "narrow"):
        assert torch.equal(results[f"{name}/logprobs"], results["own/logprobs"]), name
        assert torch.equal(results[f"{name}/choices"], results["own/choices"]), name
    for key, tensor in after(results, "own").items():
        assert torch.equal(results[key.replace("own/", "same/")], tensor), key


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_other_choices_are_used_where_there_are_any(
    found: Callable[[str, str], Found], model: str, layout: str
) -> None:
    results = found(model, layout)
    own, others = results["own/choices"], (results["own/choices"] + 1) % EXPERTS
    assert torch.equal(results["others/choices"], others)
    assert (results["others/logprobs"] - results["own/logprobs"]).abs().max() > 1e-2
    mixed = results["others_or_none/choices"]
    recorded = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)) % 2 == 1
    assert torch.equal(mixed[recorded], others[recorded])
    assert torch.equal(mixed[~recorded], own[~recorded])
    for key, tensor in after(results, "own").items():
        if key.endswith("mlp.gate.weight"):
            assert not torch.equal(results[key.replace("own/", "others/")], tensor), key


@pytest.mark.parametrize(("model", "layout"), SPLIT)
def test_layout_parity_of_replay(found: Callable[[str, str], Found], model: str, layout: str) -> None:
    results, expected = found(model, layout), found(model, "d1")
    for name, tensor in expected.items():
        if name.endswith("/choices"):
            assert torch.equal(results[name], tensor), name
        elif name.endswith("/logprobs"):
            assert (results[name] - tensor).abs().max() <= 1e-5, name
        else:
            assert (results[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "too few layers": (lambda own: own[:, : SPARSE - 1], r"shape \(75, 2, 2\)"),
    "too many layers": (lambda own: own[:, [0, 1, 2, 0, 1]], r"shape \(75, 5, 2\)"),
    "another K": (lambda own: own[..., :1], r"shape \(75, 3, 1\).*2 experts each"),
    "no layers": (lambda own: own[:, 0], r"shape \(75, 2\)"),
    "no such expert": (lambda own: own.clone().index_fill_(0, torch.tensor([7]), EXPERTS), "holds expert 8"),
    "a negative expert": (lambda own: own.clone().index_fill_(0, torch.tensor([7]), -2), "holds expert -2"),
    "a dense layer": (lambda own: own[:, [0, 0, 1, 2]], "layer 0, which is dense"),
    "half a record": (lambda own: torch.where(own == 1, -1, own), "-1 for some"),
    "twice the same": (lambda own: own[..., :1].expand(own.shape), "same expert twice"),
}


def refused(folder: Path, case: Case, batch: PackedBatch) -> dict[str, list[str]]:
    """Messages on rank 0, the only one that calls: an exchange with the other would never end."""
    engine = make_engine(folder, case)
    messages: dict[str, list[str]] = {}
    if engine.ranks.rank == 0:
        own = torch.arange(TOP_K).expand(batch.num_tokens, SPARSE, TOP_K)
        calls: list[Callable[[PackedBatch], Any]] = [
            lambda given: engine.forward(given),
            lambda given: engine.train_step(given, PolicyLoss()),
        ]
        for name, (spoil, _) in WRONG.items():
            for call in calls:
                with pytest.raises(ValueError) as error:
                    call(batch.with_tokens(routed_experts=spoil(own)))
                messages.setdefault(name, []).append(str(error.value))
    return messages


def test_wrong_choices_are_refused_by_name_before_ranks_talk(ranks: RankPool, folders: dict[str, Path]) -> None:
    (batch,) = ranks.run(clear_batch, 1, folders["dense_first"])
    messages, _ = ranks.run(refused, 2, folders["dense_first"], Case("d2e2", "dense_first"), batch, deadline=30)
    for name, (_, pattern) in WRONG.items():
        for message in messages[name]:
            assert message.startswith("routed_experts ")
            assert re.search(pattern, message), (name, message)


def test_a_model_without_experts_does_not_give_choices(tmp_path: Path) -> None:
    engine = make_engine(make_folder("dense", tmp_path), Case("d1", "dense"))
    batch = PackedBatch.from_sequences([{"input_ids": [1, 2, 3]}])
    with pytest.raises(ValueError, match="without experts .* not 'routed_experts'"):
        engine.forward(batch, ("routed_experts",))
