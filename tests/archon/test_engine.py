"""The engine against transformers and against itself: cut, order, recomputation, resume, skip; and as a critic."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import ValueLoss
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import archon
from archon.batch import PackedBatch
from archon.losses import Loss, SupervisedLoss, TokenOutputs
from archon.optim import local_shard
from archon.weights import HEAD, SCORE, read_folder

LOSS = archon.LossSpec("archon.losses.SupervisedLoss")
LENGTHS = (1, 2, 37, 5, 64, 13, 20)
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )
    folder = tmp_path_factory.mktemp("moe")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("tied")
    LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


@pytest.fixture(params=["moe", "tied"])
def folder(request: pytest.FixtureRequest, moe_folder: Path, tied_folder: Path) -> Path:
    return {"moe": moe_folder, "tied": tied_folder}[request.param]


def make_batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        mask = torch.rand(length, generator=generator) < 0.7
        mask[0] = False
        rows.append({"input_ids": torch.randint(97, (length,), generator=generator), "loss_mask": mask})
    return PackedBatch.from_sequences(rows)


def make_engine(folder: Path, **options: object) -> archon.Engine:
    optimizer = archon.OptimizerConfig(lr=1e-4, eps=1e-6, weight_decay=0.0)
    return archon.Engine.from_pretrained(folder, **{"optimizer": optimizer, "dtype": "float32", **options})


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_hf_parity_of_forward(folder: Path, temperature: float) -> None:
    batch = make_batch().with_sequences(temperature=torch.full((len(LENGTHS),), temperature))
    outputs = make_engine(folder).forward(batch, ("logprobs", "entropy"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sequence in range(batch.num_sequences):
        index = batch.token_index([sequence])
        ids, mask = batch.input_ids[index], batch.loss_mask[index]
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double() / temperature
        log_p = logits.log_softmax(-1)
        expected = torch.zeros(len(ids), dtype=torch.float64)
        expected[1:] = log_p[:-1].gather(-1, ids[1:, None])[:, 0]
        entropy = torch.zeros(len(ids), dtype=torch.float64)
        entropy[1:] = -(log_p.exp() * log_p).sum(-1)[:-1]
        assert torch.allclose(outputs.logprobs[index].double(), expected * mask, atol=1e-5, rtol=0)
        assert torch.allclose(outputs.entropy[index].double(), entropy * mask, atol=1e-5, rtol=0)


def test_hf_parity_of_three_training_steps(folder: Path) -> None:
    """Loss, gradient norm and weights equal a plain transformers + torch loop, sequence by sequence."""
    engine = make_engine(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.0)
    for step in range(3):
        batch = make_batch(seed=step)
        metrics = engine.train_step(batch, LOSS)
        total = 0.0
        for sequence in range(batch.num_sequences):
            one = batch.select([sequence])
            log_p = model(one.input_ids[None]).logits[0].log_softmax(-1)
            picked = log_p[:-1].gather(-1, one.input_ids[1:, None])[:, 0][one.loss_mask[1:]]
            loss = -picked.sum() / batch.loss_mask.sum()
            if one.loss_mask.any():
                loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert abs(metrics["loss"] - total) <= 1e-6 * max(1.0, abs(total))
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    expected = dict(model.named_parameters())
    for name, parameter in engine.model.named_parameters():
        assert relative(parameter, expected[name]) <= 1e-5, name


def gradients(engine: archon.Engine, batch: PackedBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step, read from the optimizer's first moment: exp_avg = 0.1 * gradient."""
    metrics = engine.train_step(batch, LOSS)
    state = engine.optimizer.state
    moments = {name: state[local_shard(p)]["exp_avg"] for name, p in engine.model.named_parameters()}
    return metrics["loss"], {name: moment / 0.1 for name, moment in moments.items()}


def test_loss_and_gradients_do_not_depend_on_micro_batches_or_order(folder: Path) -> None:
    no_clip = archon.OptimizerConfig(lr=1e-4, gradient_clipping=0.0)
    batch = make_batch()
    expected_loss, expected = gradients(make_engine(folder, optimizer=no_clip, max_tokens_per_mb=10_000), batch)
    order = [3, 6, 0, 5, 2, 4, 1]
    for budget, variant in [(64, batch), (90, batch), (10_000, batch.select(order)), (70, batch.select(order))]:
        loss, found = gradients(make_engine(folder, optimizer=no_clip, max_tokens_per_mb=budget), variant)
        assert abs(loss - expected_loss) <= 1e-6 * max(1.0, abs(expected_loss))
        for name, gradient in found.items():
            assert relative(gradient, expected[name]) <= 1e-5, (name, budget)


@pytest.mark.parametrize("ac_mode", ["full", "selective", "memory_budget"])
def test_recompute_gives_the_same_gradients(moe_folder: Path, ac_mode: str) -> None:
    kept_loss, kept = gradients(make_engine(moe_folder), make_batch())
    loss, found = gradients(make_engine(moe_folder, options=archon.Options(ac_mode=ac_mode)), make_batch())
    assert loss == kept_loss
    assert all(relative(found[name], kept[name]) <= 1e-6 for name in kept)


def test_bf16_compute_keeps_fp32_masters(moe_folder: Path) -> None:
    engine = make_engine(moe_folder, dtype="bfloat16")
    engine.train_step(make_batch(), LOSS)
    for name, parameter in engine.model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert engine.optimizer.state[local_shard(parameter)]["exp_avg"].dtype == torch.float32, name
    assert {tensor.dtype for _, tensor in engine.publish().tensors()} == {torch.bfloat16}
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.float32}


def test_bf16_gradients_are_those_of_fp32_within_rounding(tmp_path: Path) -> None:
    torch.manual_seed(2)
    LlamaForCausalLM(LlamaConfig(**{**COMMON, "initializer_range": 0.05})).save_pretrained(tmp_path)
    no_clip = archon.OptimizerConfig(lr=1e-4, gradient_clipping=0.0)
    loss, expected = gradients(make_engine(tmp_path, optimizer=no_clip), make_batch())
    bf16_loss, found = gradients(make_engine(tmp_path, optimizer=no_clip, dtype="bfloat16"), make_batch())
    assert bf16_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in found.items():
        assert relative(gradient, expected[name]) <= 3e-2, name


def test_mini_batches_update_once_each(moe_folder: Path) -> None:
    engine = make_engine(moe_folder)
    metrics = engine.train_step(make_batch(), LOSS, n_minibatches=3)
    steps = {int(state["step"]) for state in engine.optimizer.state.values()}
    assert steps == {3}
    assert engine.version == 1 and metrics["skipped_updates"] == 0 and metrics["micro_batches"] == 3


class _NaNOnce(SupervisedLoss):
    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> Loss:
        result = super().__call__(outputs, batch)
        return Loss(result.sum * math.nan, result.metrics)


def test_a_gradient_that_is_not_finite_is_skipped_named_and_counted(
    moe_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(moe_folder)
    before = engine.digest()
    with caplog.at_level(logging.WARNING):
        metrics = engine.train_step(make_batch(), _NaNOnce())
    assert metrics["skipped_updates"] == 1 and engine.version == 1
    assert engine.digest() == before
    assert "model.embed_tokens.weight" in caplog.text and "not finite" in caplog.text
    assert engine.train_step(make_batch(), LOSS)["skipped_updates"] == 0
    assert engine.digest() != before


def test_a_batch_without_trained_tokens_changes_nothing(moe_folder: Path) -> None:
    engine = make_engine(moe_folder)
    before = engine.digest()
    batch = make_batch()
    metrics = engine.train_step(batch.with_tokens(loss_mask=torch.zeros_like(batch.loss_mask)), LOSS)
    assert metrics["skipped_updates"] == 1 and engine.digest() == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_bit_exact(folder: Path, tmp_path: Path, dtype: str) -> None:
    options = {
        "dtype": dtype,
        "optimizer": archon.OptimizerConfig(lr=1e-3, lr_scheduler_type="cosine", total_steps=6, warmup_steps=2),
    }
    engine = make_engine(folder, **options)
    for step in range(3):
        engine.train_step(make_batch(seed=step), LOSS)
    engine.save(tmp_path / "step_3", kind="checkpoint")
    resumed = make_engine(folder, **options)
    resumed.load(tmp_path / "step_3")
    assert resumed.version == 3 and resumed.digest() == engine.digest()
    for step in range(3, 6):
        expected, found = (e.train_step(make_batch(seed=step), LOSS) for e in (engine, resumed))
        assert expected == found
    assert resumed.digest() == engine.digest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_before_the_first_step_does_not_change_it(folder: Path, tmp_path: Path, dtype: str) -> None:
    saved, never_saved = make_engine(folder, dtype=dtype), make_engine(folder, dtype=dtype)
    saved.save(tmp_path / "step_0", kind="checkpoint")
    for step in range(2):
        assert saved.train_step(make_batch(seed=step), LOSS) == never_saved.train_step(make_batch(seed=step), LOSS)
    assert saved.digest() == never_saved.digest()


def test_saved_folder_goes_through_transformers_bit_equal(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder)
    engine.train_step(make_batch(), LOSS)
    engine.save(tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(dict(theirs.named_parameters())[name], parameter), name
    theirs.save_pretrained(tmp_path / "theirs")
    again = make_engine(tmp_path / "theirs")
    assert again.digest() == engine.digest()


_KILLED_WHILE_SAVING = """
import sys, threading, time, os
from pathlib import Path
sys.path[:0] = {tests!r}
from test_engine import make_batch, make_engine, LOSS
engine = make_engine(Path({folder!r}))
engine.train_step(make_batch(), LOSS)
engine.save({path!r}, kind="checkpoint")
print(engine.digest(), flush=True)
while True:
    engine.train_step(make_batch(), LOSS)
    engine.save({path!r} + f"_{{engine.version}}", kind="checkpoint")
    print(engine.version, flush=True)
"""


def test_a_kill_in_the_middle_of_a_save_leaves_only_complete_checkpoints(moe_folder: Path, tmp_path: Path) -> None:
    script = _KILLED_WHILE_SAVING.format(
        tests=[str(path) for path in Path(__file__).parents[:2]], folder=str(moe_folder), path=str(tmp_path / "step")
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    digest = process.stdout.readline().strip()
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    engine = make_engine(moe_folder)
    engine.load(tmp_path / "step")
    assert engine.digest() == digest and engine.version == 1
    for path in tmp_path.glob("step_*"):
        engine.load(path)
        assert engine.version == int(path.name.removeprefix("step_"))


def test_wrong_uses_are_refused_by_name(moe_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layout d2: needs 2 processes, 1 is running"):
        make_engine(moe_folder, layout="d2")
    with pytest.raises(ValueError, match="dtype is 'float16'"):
        make_engine(moe_folder, dtype="float16")
    engine = make_engine(moe_folder, optimizer=None)
    with pytest.raises(RuntimeError, match="optimizer"):
        engine.train_step(make_batch(), LOSS)
    with pytest.raises(ValueError, match="'values'"):
        engine.forward(make_batch(), ("values",))
    with pytest.raises(ValueError, match="a critic gives values and last_value, not 'logprobs'"):
        make_engine(moe_folder, optimizer=None, is_critic=True).forward(make_batch())
    with pytest.raises(ValueError, match="offload_params .* runs on the CPU"):
        make_engine(moe_folder, options=archon.Options(offload_params=True))
    with pytest.raises(FileNotFoundError, match="nothing_here"):
        make_engine(tmp_path / "nothing_here")


@pytest.mark.parametrize("kind", ["hf", "checkpoint"])
def test_a_critic_starts_from_a_language_model_at_zero_and_keeps_its_score(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    engine = make_engine(folder, is_critic=True)
    language_model, critic = dict(read_folder(folder)), dict(engine.weights())
    assert critic.keys() == (language_model.keys() - {HEAD}) | {SCORE}
    assert all(torch.equal(critic[name], language_model[name]) for name in critic.keys() - {SCORE})
    assert critic[SCORE].shape == (1, COMMON["hidden_size"]) and not critic[SCORE].any()
    assert not engine.forward(make_batch(), ("values",)).values.any()
    for step in range(2):
        engine.train_step(make_batch(seed=step), ValueLoss())
    assert dict(engine.weights())[SCORE].any()
    engine.save(tmp_path / "saved", kind=kind)
    again = make_engine(tmp_path / "saved" if kind == "hf" else folder, is_critic=True)
    if kind == "checkpoint":
        again.load(tmp_path / "saved")
    assert again.digest() == engine.digest()
    for name in ("values", "last_value"):
        found, expected = (getattr(one.forward(make_batch(), (name,)), name) for one in (again, engine))
        assert torch.equal(found, expected)


def test_learning_rate_schedule_table() -> None:
    """Warm-up is counted once and the minimum is reached at the last step, not before."""
    linear = archon.OptimizerConfig(
        lr=1.0, lr_scheduler_type="linear", warmup_steps=4, total_steps=14, min_lr_ratio=0.1
    )
    assert [linear.lr_at(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert linear.lr_at(4) == 1.0
    assert linear.lr_at(9) == pytest.approx(0.55)
    assert linear.lr_at(13) == pytest.approx(0.19) and linear.lr_at(14) == pytest.approx(0.1)
    cosine = archon.OptimizerConfig(lr=2.0, lr_scheduler_type="cosine", warmup_steps_proportion=0.1, total_steps=20)
    assert [cosine.lr_at(step) for step in range(2)] == [1.0, 2.0]
    assert cosine.lr_at(11) == pytest.approx(1.0) and cosine.lr_at(20) == pytest.approx(0.0)
    constant = archon.OptimizerConfig(lr=3.0)
    assert constant.lr_at(0) == constant.lr_at(10**6) == 3.0
    with pytest.raises(ValueError, match="total_steps"):
        archon.OptimizerConfig(lr_scheduler_type="linear")


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        raise MemoryError("in the middle")


class BreakingLoss(SupervisedLoss):
    """Its backward raises, after that of the head."""

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> Loss:
        assert outputs.logprobs is not None
        return Loss(_Breaks.apply(outputs.logprobs).sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_a_broken_backward_the_engine_refuses_to_go_on(moe_folder: Path, dtype: str) -> None:
    engine = make_engine(moe_folder, dtype=dtype)
    before = engine.digest()
    with pytest.raises(MemoryError):
        engine.train_step(make_batch(), BreakingLoss())
    for call in (lambda: engine.train_step(make_batch(), LOSS), lambda: engine.forward(make_batch())):
        with pytest.raises(RuntimeError, match="load the last checkpoint"):
            call()
    assert engine.digest() == before


def test_a_batch_is_dealt_into_at_least_one_mini_batch(moe_folder: Path) -> None:
    with pytest.raises(ValueError, match="0 mini-batches"):
        make_engine(moe_folder).train_step(make_batch(), LOSS, n_minibatches=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scoring_leaves_the_weights_as_they_were(moe_folder: Path, dtype: str) -> None:
    """What ``fully_shard`` gathers in bf16 for a forward must not be taken for the masters."""
    engine = make_engine(moe_folder, dtype=dtype)
    for _ in range(2):
        before = engine.digest()
        engine.forward(make_batch())
        assert engine.digest() == before
        engine.train_step(make_batch(), LOSS)
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.float32}
