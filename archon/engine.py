"""Engine: a causal language model that trains, scores and exports. One class, whatever the layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from archon import checkpoint, phase, weights
from archon.batch import PackedBatch, mini_batches
from archon.checkpoint import Saving
from archon.device import default_device, peak_memory_bytes
from archon.layout import Layout
from archon.losses import LossFn, LossSpec, TokenOutputs
from archon.mesh import make_ranks, running_processes
from archon.micro_batch import MicroBatch, plan_slots
from archon.models.config import ModelConfig
from archon.models.decoder import initial_weights
from archon.models.families import FAMILIES, critic_architecture
from archon.optim import (
    OptimizerConfig,
    apply_gradients,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    nonfinite_gradients,
)
from archon.options import Options
from archon.parallel.fit import check_fit
from archon.parallel.model import ShardedModel
from archon.report import StepReport
from archon.routers import RECORDED, Routers
from archon.training_state import copy_second_embedding, training_state

T = TypeVar("T")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_OUTPUTS = {False: ("logprobs", "entropy", RECORDED), True: ("values", "last_value", RECORDED)}
"""Fields of TokenOutputs that a language model gives, and those that a critic gives."""


@dataclass(frozen=True)
class Publication:
    """Weights on their way out: a version, and a stream of (disk name, CPU tensor) at the compute dtype."""

    version: int
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


class Engine:
    """A causal language model, or a critic, in fp32 master weights with its optimizer.

    ::

        engine = archon.Engine.from_pretrained("path/to/hf_folder", optimizer=archon.OptimizerConfig(lr=1e-5))
        batch = archon.PackedBatch.from_sequences([{"input_ids": ids} for ids in token_lists])
        print(engine.train_step(batch, archon.LossSpec("archon.losses.SupervisedLoss")))

    With a layout of several processes, each of them builds the engine and makes the same calls with the same arguments:
    the whole batch goes in everywhere, each process trains its share, and the same results come out everywhere.

    Attributes:
        version: completed training steps.
        config: the model's shape.
    """

    def __init__(
        self,
        model: ShardedModel,
        *,
        folder: Path,
        optimizer: OptimizerConfig | None,
        max_tokens_per_mb: int,
    ) -> None:
        self.model, self.config, self.ranks, self.options = model, model.config, model.ranks, model.options
        self.device, self.dtype = model.device, model.dtype
        self.folder, self.max_tokens_per_mb = folder, max_tokens_per_mb
        self.version = 0
        self.optimizer_config = optimizer
        self.optimizer = build_optimizer(model.all_parameters, optimizer) if optimizer else None
        moe = self.config.moe
        self.routers = (
            Routers(model.parts.values(), self.config.num_hidden_layers, moe, self.ranks, self.options) if moe else None
        )
        self._saving: Saving | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        layout: str | Layout = "d1",
        optimizer: OptimizerConfig | None = None,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        device: torch.device | str | None = None,
        max_tokens_per_mb: int = 8192,
        options: Options | None = None,
        is_critic: bool = False,
        init_from_scratch: bool = False,
        seed: int = 1,
    ) -> Engine:
        """Build an engine from a local Hugging Face folder.

        Args:
            path: folder with ``config.json`` and, unless ``init_from_scratch``, safetensors weights.
            layout: how the model is spread, such as ``d1`` or ``d4p2t2c2e4``.
            optimizer: None gives an engine that only scores.
            dtype: of the computation. Parameters, gradients and optimizer states are fp32 in either case.
            max_tokens_per_mb: token budget of a micro-batch; a longer sequence raises it for its step.
            options: how the layout runs.
            is_critic: predict values; a folder without a ``score`` starts with one that predicts 0.
            init_from_scratch: draw the weights from the config's ``initializer_range`` with ``seed``.

        Raises:
            FileNotFoundError: the folder or its ``config.json`` is missing.
            LayoutMisfit: the model, the options or the number of processes do not fit the layout.
            ValueError: an unsupported model, layout or dtype; weights that do not match the config.
        """
        folder, options = Path(path), options or Options()
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}; it is one of {', '.join(_DTYPES)}")
        chosen = torch.device(device) if device is not None else default_device()
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        config = ModelConfig.from_folder(folder)
        check_fit(layout, config, options, world_size=running_processes())
        if options.offload_params and chosen.type == "cpu":
            raise ValueError(
                "offload_params moves parameters from an accelerator to the host, and this engine runs on the CPU: "
                "leave it out"
            )
        if options.compile is not None and options.compile not in torch.compiler.list_backends(exclude_tags=()):
            raise ValueError(f"compile is {options.compile!r}, which is no backend of torch.compile here")
        if options.deterministic:
            torch.use_deterministic_algorithms(True)
        with phase.of("load"):
            ranks = make_ranks(layout, config, options, chosen)
            model = ShardedModel(config, ranks, options, dtype=_DTYPES[dtype], device=chosen, is_critic=is_critic)
            if init_from_scratch:
                model.load(initial_weights(config, torch.Generator(chosen).manual_seed(seed), is_critic=is_critic))
            else:
                model.load_folder(folder)
        return cls(model, folder=folder, optimizer=optimizer, max_tokens_per_mb=max_tokens_per_mb)

    @property
    def layout(self) -> Layout:
        return self.ranks.layout

    @torch.no_grad()
    def forward(self, batch: PackedBatch, what: Sequence[str] = ("logprobs",)) -> TokenOutputs:
        """Score a batch without gradient.

        Args:
            batch: any mask; tokens outside ``loss_mask`` cost no LM-head work and score 0. With a token column
                ``routed_experts [T, L, K]`` routers take these choices instead of their own, except where it is -1.
            what: fields of TokenOutputs to compute: ``logprobs`` and ``entropy``, or ``values`` and ``last_value`` of a
                critic; and ``routed_experts``.

        Returns:
            Columns ``[T]`` (``last_value``: ``[N]``) fp32 on the CPU, in the order of the batch.

        Raises:
            ValueError: a field that this model does not give, or recorded choices that do not fit it.
        """
        self._check_outputs(what)
        self._check_whole()
        self.model.train_mode(False)
        columns = self._blank_columns(batch, what)
        micro_batches = self._micro_batches(batch, what, training=False)
        try:
            for micro_batch, head in zip(micro_batches, self.model.pipeline.forward(micro_batches), strict=True):
                if head is not None and micro_batch.batch is not None:
                    outputs = micro_batch.outputs(head)
                    index = batch.token_index(micro_batch.sequences)
                    for name in columns.keys() - {RECORDED}:
                        place = micro_batch.sequences if name == "last_value" else index
                        columns[name][place] = getattr(outputs, name).cpu()
        finally:
            self.model.rest()
        if RECORDED in columns:
            self._copy_choices(batch, micro_batches, columns[RECORDED])
        if self.ranks.host is not None:
            for name, column in columns.items():
                if name != RECORDED and not (self.ranks.shares_outputs and self.model.pipeline.last):
                    column.zero_()
                dist.all_reduce(column, group=self.ranks.host)
        return TokenOutputs(**columns)

    def _blank_columns(self, batch: PackedBatch, what: Sequence[str]) -> dict[str, Tensor]:
        columns = {name: torch.zeros(batch.num_tokens) for name in what}
        if "last_value" in columns:
            columns["last_value"] = torch.zeros(batch.num_sequences)
        if RECORDED in columns:
            assert self.routers is not None
            shape = (batch.num_tokens, len(self.routers.layers), self.routers.moe.experts_per_token)
            columns[RECORDED] = torch.zeros(shape, dtype=torch.long)
        return columns

    def _copy_choices(self, batch: PackedBatch, micro_batches: Sequence[MicroBatch], column: Tensor) -> None:
        """Write the choices that this rank's routers made for its tokens."""
        assert self.routers is not None
        for micro_batch in micro_batches:
            routing = micro_batch.routing
            assert routing is not None
            index = batch.token_index(micro_batch.sequences)
            for layer, chosen in routing.chosen.items():
                column[index[routing.tokens[routing.real].cpu()], self.routers.layers.index(layer)] = chosen[
                    routing.real
                ].cpu()

    def train_step(self, batch: PackedBatch, loss: LossSpec | LossFn, *, n_minibatches: int = 1) -> dict[str, float]:
        """Train on one batch: ``n_minibatches`` optimizer updates, then ``version`` grows by one.

        The loss finds a sequence column ``current_version`` (fp64): completed steps plus the part of this step's
        updates that is done.

        An update whose gradient is not finite is skipped, named in the log and counted in ``skipped_updates``.

        Returns:
            ``loss`` (mean over updates), ``grad_norm`` (largest over updates, before clipping), ``lr``,
            ``skipped_updates``, ``micro_batches``, the loss's own metrics as global means and, by layer with experts,
            ``moe/layer_N/max_violation`` (load of the busiest expert over the mean, less 1) and ``idle_experts``.

        Raises:
            RuntimeError: the engine was built without an optimizer, or a backward pass broke off before.
            ValueError: the loss reads what this model does not give, or recorded choices do not fit it.
        """
        if self.optimizer is None or self.optimizer_config is None:
            raise RuntimeError("this engine only scores: build it with optimizer=OptimizerConfig(...) to train")
        loss_fn = loss.build() if isinstance(loss, LossSpec) else loss
        self._check_outputs(loss_fn.outputs)
        if RECORDED in loss_fn.outputs:
            raise ValueError(f"a loss cannot read {RECORDED}: put them into the batch, from forward")
        self._check_whole()
        learning_rate = self.optimizer_config.lr_at(self.version)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.model.train_mode(True)
        with phase.of("prepare"):
            batch = loss_fn.prepare(batch)
        report = StepReport()
        shares = mini_batches(batch, n_minibatches)
        for done, indices in enumerate(shares):
            share = batch.select(indices)
            now = torch.full((share.num_sequences,), self.version + done / len(shares), dtype=torch.float64)
            self._update(share.with_sequences(current_version=now), loss_fn, report)
        if self.ranks.host is not None:
            with phase.of("reduce"):
                report.gather(self.ranks.host)
        self.version += 1
        return {**report.metrics(), "lr": learning_rate}

    def _update(self, batch: PackedBatch, loss_fn: LossFn, report: StepReport) -> None:
        assert self.optimizer is not None and self.optimizer_config is not None
        denominator = loss_fn.denominator(batch)
        if denominator == 0:
            report.skip("no token to train on")
            return
        with phase.of("prepare"):
            micro_batches = self._micro_batches(batch, loss_fn.outputs, training=True)

        def loss_of(micro_batch: MicroBatch, columns: Tensor) -> Tensor:
            if micro_batch.batch is None:
                return columns.sum() * 0.0  # filler: the ranks stay in step, and nothing is learned
            result = loss_fn(micro_batch.outputs(columns), micro_batch.batch)
            share = result.sum / denominator.to(result.sum)
            if self.ranks.shares_outputs:
                report.add(share.item(), result.metrics)
            return share if share.requires_grad else columns.sum() * 0.0

        try:
            self.model.pipeline.train(micro_batches, loss_of)
            finite = self._apply_gradients(report)
        finally:
            self.model.rest()  # after an error too: nothing of this update may reach the next
        report.micro_batches += len(micro_batches)
        if self.routers is not None:
            for micro_batch in micro_batches:
                assert micro_batch.routing is not None
                self.routers.collect(micro_batch.routing)
            self.routers.finish_update(report, updated=finite)

    def _apply_gradients(self, report: StepReport) -> bool:
        """Clip and step, if the gradients of all ranks are finite; returns whether they are."""
        assert self.optimizer is not None and self.optimizer_config is not None
        with phase.of("reduce"):
            self.model.share_embedding_gradient()
            norm = gradient_norm((parameter for _, parameter in self.model.named_parameters()), self.ranks.host)
        if not torch.isfinite(norm):
            elsewhere = "another process" if self.ranks.host is not None else "all parameters together"
            named = ", ".join(nonfinite_gradients(self.model.named_parameters())[:4]) or elsewhere
            report.skip(f"gradient of {named} is not finite")
            return False
        with phase.of("optimizer"):
            if self.optimizer_config.gradient_clipping > 0:
                clip_gradients(self.model.all_parameters, norm, self.optimizer_config.gradient_clipping)
            apply_gradients(self.optimizer, self.model.all_parameters)
        report.update(float(norm))
        return True

    def _micro_batches(self, batch: PackedBatch, what: Sequence[str], training: bool) -> list[MicroBatch]:
        """This rank's micro-batches of a batch, as many as every other rank has."""
        routing = None if self.routers is None else self.routers.arguments(batch, training)
        head = (
            ("values",) if self.model.is_critic else tuple(name for name in what if name != RECORDED) or ("logprobs",)
        )
        slots = plan_slots(batch, self.max_tokens_per_mb, self.ranks, self.config, self.options)
        return [MicroBatch.build(batch, slot, head, self.ranks, self.device, routing) for slot in slots]

    def _check_whole(self) -> None:
        if self.model.pipeline.broken:
            raise RuntimeError(
                "a backward pass broke off in this engine, and what fully_shard keeps of it would spoil later "
                "gradients: build the engine again and load the last checkpoint"
            )

    def _check_outputs(self, what: Sequence[str]) -> None:
        given = _OUTPUTS[self.model.is_critic]
        unknown = [name for name in what if name not in given or (name == RECORDED and self.routers is None)]
        if unknown:
            kind = "critic" if self.model.is_critic else "causal language model"
            experts = "" if self.routers is not None else " without experts"
            raise ValueError(f"a {kind}{experts} gives {' and '.join(given[:2])}, not {unknown[0]!r}")

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Stream (Hugging Face disk name, CPU tensor), one at a time; ``dtype`` None keeps fp32.

        With several processes this is a collective, and every process gets the whole stream.
        """
        with phase.of("weights"):
            yield from self.model.stream(dtype)

    def publish(self) -> Publication:
        """The current weights for inference, at the compute dtype.

        With several processes all of them iterate to the end, and rank 0 gets the tensors.
        """
        return Publication(self.version, lambda: self._weights_to_first(self.dtype))

    def digest(self) -> str:
        """Digest of the fp32 weights: equal digests mean bit-equal weights."""
        return self._from_first(weights.digest(self._weights_to_first(None)))

    def _weights_to_first(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        with phase.of("weights"):
            yield from self.model.stream(dtype, everywhere=False)

    def save(self, path: str | Path, kind: Literal["hf", "checkpoint"] = "hf", *, wait: bool = True) -> None:
        """Write a Hugging Face folder in the dtype of the source folder, or a checkpoint of the whole training state.

        The folder appears under ``path`` complete or not at all; an existing one is replaced. A checkpoint loads into
        any layout. With ``wait`` False it is copied to host memory and written while training goes on; ``saved`` waits.

        Raises:
            ValueError: a Hugging Face folder in the background.
        """
        self.saved()
        if kind == "checkpoint":
            with phase.of("checkpoint"):
                self._saving = checkpoint.save(
                    Path(path), self._state(), {"version": self.version}, group=self.ranks.background, wait=wait
                )
            return
        if not wait:
            raise ValueError("only a checkpoint is saved in the background: save this folder with wait=True")
        self._save_folder(Path(path))

    def saved(self, timeout: float | None = None) -> None:
        """Wait until what ``save`` began in the background is on the disk.

        Raises:
            CheckpointError: it could not be written.
            TimeoutError: it is not there after ``timeout`` seconds; wait again.
        """
        if self._saving is None:
            return
        try:
            with phase.of("checkpoint"):
                self._saving.result(timeout)
        finally:
            if self._saving.done():
                self._saving = None

    def _save_folder(self, path: Path) -> None:
        """One process writes, all stream; an error there is an error everywhere."""
        stream = self._weights_to_first(self._folder_dtype())
        failure: Exception | None = None
        try:
            if self.ranks.rank == 0:
                weights.save_folder(path, stream, self.folder, changes=self._config_changes())
        except Exception as error:  # raised below, when the others know
            failure = error
        for _ in stream:  # what is left of it after a failure, and on the other ranks
            pass
        said = self._from_first(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        if said is not None:
            raise OSError(f"rank 0 could not write {path}: {said}")

    def load(self, path: str | Path) -> None:
        """Load what ``save`` wrote: a checkpoint restores weights, optimizer and version; a folder only weights."""
        self.saved()
        with phase.of("load"):
            # Ranks that see files differently must not go different ways.
            if self._from_first(checkpoint.is_checkpoint(Path(path))):
                # An engine that only scores leaves the optimizer's states, and nothing of the model.
                strict = "model." if self.optimizer is None else ""
                state = checkpoint.load(Path(path), self._state(), strict_names=strict)
                self.version = int(state["version"])
                copy_second_embedding(self.model.parts.values(), self.optimizer)
            else:
                self.model.load_folder(Path(path))

    def _from_first(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.ranks.host is None:
            return value
        said = [value]
        dist.broadcast_object_list(said, src=0, group=self.ranks.host)
        return said[0]

    def _state(self) -> dict[str, Tensor]:
        """Everything that training goes on from, by name; tensors share memory with the model and the optimizer."""
        return training_state(self.model.parts.values(), self.optimizer)

    def health(self) -> dict[str, Any]:
        """Version, layout and peak memory (bytes) of this process."""
        return {
            "version": self.version,
            "layout": str(self.layout),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }

    def _config_changes(self) -> dict[str, Any]:
        """What the config of an exported folder says other than that of the source folder."""
        if not self.model.is_critic:
            return {}
        return {"architectures": [critic_architecture(FAMILIES[self.config.model_type])], "num_labels": 1}

    def _folder_dtype(self) -> torch.dtype:
        values = json.loads((self.folder / "config.json").read_text())
        return _DTYPES.get(values.get("dtype") or values.get("torch_dtype") or "float32", torch.float32)
