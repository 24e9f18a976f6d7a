"""What an engine saved in one layout, every other loads, goes on training from, and exports: bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import Case, Observed, PolicyLoss, ValueLoss, assert_same, make_batch, make_folder, merged
from rank_pool import RankPool
from tiny_models import build
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import archon
from archon.checkpoint import CheckpointError
from archon.layout import Layout
from archon.training_state import training_state
from archon.weights import digest, named_weights, save_folder

LENGTHS = (37, 5, 64, 13, 20, 41)
BEFORE, AFTER = 2, 2  # training steps before the checkpoint and after it
BALANCED = {"moe_router_bias_update_rate": 0.01}
ZBV = {"pp_schedule": "ZBVZeroBubble"}
MODELS = {
    "tied": (
        [("d1", {}), ("p2t2", {}), ("p2d2", ZBV)],
        [("d1", {}), ("p4", {}), ("p2t2", ZBV), ("c2t2", {}), ("r2d2", {}), ("d3", {})],
    ),
    "dense_first": (
        [("d1", {}), ("d2t2e4", {}), ("(attn:p2d2t2|ffn:p2d1t2e2)", {"pp_schedule": "Interleaved1F1B"})],
        [
            ("d1", {}),
            ("d4e2", {}),
            ("(attn:d2t2|ffn:d1t4)", {}),
            ("(attn:c2t2|ffn:d2t1e2)", {"context": "ring"}),
            ("r2c2e2", {}),
            ("p2d2t2e4", {"pp_schedule": "InterleavedZeroBubble"}),
        ],
    ),
}
"""By model, layouts that save, and layouts that load what each of those saved."""


@dataclass
class Held:
    """What an engine trains on from, without its values.

    Attributes:
        version: of the engine.
        weights: digest of all of them.
        states: digest of each optimizer state, whole, by name; of those that this rank's parts have.
    """

    version: int
    weights: str
    states: dict[str, str]

    @classmethod
    def of(cls, engine: archon.Engine) -> Held:
        states = {
            name: digest([("", value.full_tensor() if isinstance(value, DTensor) else value)])
            for name, value in training_state(engine.model.parts.values(), engine.optimizer).items()
            if name.startswith("optimizer.")
        }
        return cls(engine.version, engine.digest(), states)


def together(ranks: list[Held]) -> Held:
    """What all ranks hold, after checking that they agree on what several of them hold."""
    first = ranks[0]
    for other in ranks:
        assert (other.version, other.weights) == (first.version, first.weights)
        assert all(other.states[name] == first.states[name] for name in other.states.keys() & first.states)
        first = replace(first, states=first.states | other.states)
    return first


def case(model: str, layout: str, options: dict[str, Any], is_critic: bool = False) -> Case:
    balanced = BALANCED if model == "dense_first" else {}
    return Case(layout, model, {**options, **balanced}, is_critic=is_critic, lengths=LENGTHS)


def world_size(case: Case) -> int:
    return Layout.parse(case.layout).world_size


def make_engine(folder: Path, case: Case, *, trains: bool = True) -> archon.Engine:
    # A learning rate that moves shows whether a resumed engine knows its step.
    optimizer = archon.OptimizerConfig(lr=1e-4, eps=1e-6, lr_scheduler_type="linear", total_steps=10)
    return archon.Engine.from_pretrained(
        folder,
        layout=case.layout,
        optimizer=optimizer if trains else None,
        dtype="float32",
        device="cpu",
        max_tokens_per_mb=case.budget,
        options=archon.Options(**case.options),
        is_critic=case.is_critic,
    )


def train(engine: archon.Engine, case: Case, first: int, steps: int) -> Observed:
    loss = ValueLoss() if case.is_critic else PolicyLoss()
    metrics = [engine.train_step(make_batch(step, case.lengths), loss) for step in range(first, first + steps)]
    scores = engine.forward(make_batch(BEFORE + AFTER, case.lengths), loss.outputs)
    columns = {name: getattr(scores, name) for name in loss.outputs}
    return Observed(metrics, columns, {}, {name: tensor.clone() for name, tensor in engine.weights()})


# ---- what each rank does


def uninterrupted(folder: Path, case: Case) -> Observed:
    engine = make_engine(folder, case)
    train(engine, case, 0, BEFORE)
    return train(engine, case, BEFORE, AFTER)


def saved(folder: Path, case: Case, path: Path) -> Held:
    engine = make_engine(folder, case)
    train(engine, case, 0, BEFORE)
    engine.save(path, "checkpoint")
    return Held.of(engine)


def resumed(folder: Path, case: Case, paths: list[Path], export: Path | None) -> tuple[list[Held], Observed]:
    """What the engine holds of each checkpoint, and how it goes on from the last."""
    engine, held = make_engine(folder, case), []
    for path in paths:
        engine.load(path)
        held.append(Held.of(engine))
        if export is not None:
            engine.save(export / path.name)
    return held, train(engine, case, BEFORE, AFTER)


def scored(folder: Path, case: Case, path: Path) -> tuple[int, str, Tensor | None]:
    engine = make_engine(folder, case, trains=False)
    engine.load(path)
    what = "values" if case.is_critic else "logprobs"
    return engine.version, engine.digest(), getattr(engine.forward(make_batch(0, case.lengths), (what,)), what)


# ---- any layout to any other


@dataclass
class Written:
    """Checkpoints of one model from several layouts, and how training goes on where nothing was interrupted."""

    folder: Path
    checkpoints: dict[str, Path]
    held: dict[str, Held]
    expected: Observed


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Iterator[dict[str, Written]]:
    models = {}
    for model, (writers, _) in MODELS.items():
        root = tmp_path_factory.mktemp(model)
        folder = make_folder(model, root)
        checkpoints, held = {}, {}
        for number, (layout, options) in enumerate(writers):
            one = case(model, layout, options)
            checkpoints[one.id] = root / f"from_{number}"
            held[one.id] = together(ranks.run(saved, world_size(one), folder, one, checkpoints[one.id]))
        expected = ranks.run(uninterrupted, 1, folder, case(model, "d1", {}))[0]
        models[model] = Written(folder, checkpoints, held, expected)
    yield models


READERS = [case(model, *reader) for model, (_, readers) in MODELS.items() for reader in readers]
REPEATED = ("c2t2", "(attn:d2t2|ffn:d1t4)")  # what the others read too, in other combinations


@pytest.mark.parametrize(
    "reader",
    [pytest.param(one, marks=pytest.mark.slow if one.layout in REPEATED else ()) for one in READERS],
    ids=[reader.id for reader in READERS],
)
def test_layout_parity_after_loading_what_another_layout_saved(
    reader: Case, written: dict[str, Written], ranks: RankPool
) -> None:
    model = written[reader.model]
    exports = model.folder.parent / f"exports_{reader.id}"
    turn = READERS.index(reader) % len(model.checkpoints)  # so that readers go on from different writers
    writers = [*model.checkpoints][turn:] + [*model.checkpoints][:turn]
    paths = [model.checkpoints[writer] for writer in writers]
    found = ranks.run(resumed, world_size(reader), model.folder, reader, paths, exports)
    for writer, *held in zip(writers, *(held for held, _ in found), strict=True):
        assert together(held) == model.held[writer], writer
    ours = merged([observed for _, observed in found])
    assert_same(ours, model.expected)
    assert [step["lr"] for step in ours.metrics] == [step["lr"] for step in model.expected.metrics]
    assert_same_folders(exports, model)


def assert_same_folders(exports: Path, model: Written) -> None:
    """Every file is the same to the last byte as what the first reader exported of the same checkpoint."""
    reference = model.folder.parent / "exports"
    if not reference.exists():
        exports.rename(reference)
        return
    for path in model.checkpoints.values():
        ours, theirs = exports / path.name, reference / path.name
        assert sorted(file.name for file in ours.iterdir()) == sorted(file.name for file in theirs.iterdir())
        for file in theirs.iterdir():
            assert (ours / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_models_of_these_tests_have_what_could_be_lost(written: dict[str, Written]) -> None:
    weights = written["dense_first"].expected.weights
    biases = [tensor for name, tensor in weights.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and all(bias.abs().max() > 0.02 for bias in biases)
    assert "lm_head.weight" not in written["tied"].expected.weights
    for model in written.values():
        held = list(model.held.values())
        # Each layout rounds its own way: were these equal, a layout could pass with the checkpoint of another.
        assert len({one.weights for one in held}) == len(held)
        assert {one.version for one in held} == {BEFORE}
        assert all(one.states.keys() == held[0].states.keys() for one in held)


# ---- without an optimizer, and critics


def test_layout_parity_of_an_engine_that_only_scores(written: dict[str, Written], ranks: RankPool) -> None:
    model = written["dense_first"]
    for name, path in model.checkpoints.items():
        one = case("dense_first", "p2d2e2", {})
        alone = ranks.run(scored, 1, model.folder, case("dense_first", "d1", {}), path)[0]
        for version, weights, logprobs in ranks.run(scored, 4, model.folder, one, path):
            assert (version, weights) == (BEFORE, model.held[name].weights) == alone[:2]
            torch.testing.assert_close(logprobs, alone[2], atol=1e-5, rtol=0)


def without_the_bias(folder: Path, case: Case, path: Path, trains: bool) -> str:
    engine = make_engine(folder, case, trains=trains)
    with pytest.raises(CheckpointError) as error:
        engine.load(path)
    return str(error.value)


@pytest.mark.parametrize("trains", [True, False])
def test_a_balance_bias_is_not_left_behind(trains: bool, written: dict[str, Written], ranks: RankPool) -> None:
    """Without it the router would choose other experts than those that were trained."""
    model = written["dense_first"]
    path = next(iter(model.checkpoints.values()))
    for said in ranks.run(without_the_bias, 2, model.folder, Case("d2", "dense_first"), path, trains):
        assert "no rank asks for model.model.layers.1.mlp.gate.e_score_correction_bias, " in said


def test_layout_parity_of_critics(tmp_path: Path, ranks: RankPool) -> None:
    folder = make_folder("normed", tmp_path, is_critic=True)
    writer, reader, alone = (case("normed", layout, {}, is_critic=True) for layout in ("p2d2", "c2t2", "d1"))
    held = together(ranks.run(saved, 4, folder, writer, tmp_path / "step"))
    found = ranks.run(resumed, 4, folder, reader, [tmp_path / "step"], None)
    assert together([rank for (rank,), _ in found]) == held
    assert_same(merged([observed for _, observed in found]), ranks.run(uninterrupted, 1, folder, alone)[0])
    for version, weights, values in ranks.run(scored, 4, folder, reader, tmp_path / "step"):
        assert (version, weights) == (BEFORE, held.weights) and values is not None and values.abs().max() > 0


# ---- exports


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made while it is active that are still alive, and keeps the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = WeakIdKeyDictionary()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on what this rank holds
        before = {id(tensor.untyped_storage()) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, Tensor)
                and not tensor.is_meta
                and id(storage := tensor.untyped_storage()) not in before
            ):
                self.live[storage] = storage.nbytes()
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def streamed(folder: Path, case: Case) -> tuple[int, list[int], int, int]:
    """Peak of the memory to load, and to stream everywhere and to rank 0; the largest stored tensor; all of them."""
    engine = make_engine(folder, case, trains=False)
    with LiveBytes() as loading:
        engine.load(folder)
    peaks = []
    for stream in (engine.weights, engine.publish().tensors):
        with LiveBytes() as memory:
            for _ in stream():
                pass
        peaks.append(memory.peak)
    sizes = [tensor.nbytes for tensor in engine.model.whole.parameters()]
    return loading.peak, peaks, max(sizes), sum(sizes)


@pytest.mark.parametrize("layout", ["d4e2", "(attn:p2d2|ffn:p2d1t2)"])
def test_loading_and_streaming_hold_one_tensor_at_a_time(layout: str, tmp_path: Path, ranks: RankPool) -> None:
    many = build("qwen3_moe", num_hidden_layers=12, mlp_only_layers=[])
    save_folder(tmp_path / "many", named_weights(many), many.config.to_dict())
    one = Case(layout, "moe")
    for to_load, peaks, largest, total in ranks.run(streamed, world_size(one), tmp_path / "many", one):
        assert total > 10 * largest and to_load < largest, "the largest is a stack of experts, loaded one by one"
        # The pieces of all ranks as they arrive, and the tensor put together from them.
        assert all(largest <= peak <= 3 * largest for peak in peaks), (peaks, largest)
