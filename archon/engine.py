"""Engine: a causal language model that trains, scores and exports. One class, whatever the layout."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from archon import checkpoint, weights
from archon.batch import PackedBatch, micro_batches, mini_batches
from archon.device import default_device, peak_memory_bytes
from archon.layout import Layout
from archon.losses import LossFn, LossSpec, TokenOutputs
from archon.mesh import data_mesh
from archon.models.config import ModelConfig
from archon.models.decoder import Decoder
from archon.optim import OptimizerConfig, build_optimizer, clip_gradients, gradient_norm, nonfinite_gradients

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_OUTPUTS = ("logprobs", "entropy")


@dataclass(frozen=True)
class Publication:
    """Weights on their way out: a version, and a stream of (disk name, CPU tensor) at the compute dtype."""

    version: int
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


class Engine:
    """A causal language model in fp32 master weights with its optimizer.

    ::

        engine = archon.Engine.from_pretrained("path/to/hf_folder", optimizer=archon.OptimizerConfig(lr=1e-5))
        batch = archon.PackedBatch.from_sequences([{"input_ids": ids} for ids in token_lists])
        print(engine.train_step(batch, archon.LossSpec("archon.losses.SupervisedLoss")))

    Attributes:
        version: completed training steps.
        config: the model's shape.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        folder: Path,
        layout: Layout,
        optimizer: OptimizerConfig | None,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens_per_mb: int,
    ) -> None:
        self.model = model
        self.config: ModelConfig = model.config
        self.folder = folder
        self.layout = layout
        self.device = device
        self.dtype = dtype
        self.max_tokens_per_mb = max_tokens_per_mb
        self.version = 0
        mesh = data_mesh(layout, device)
        if dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
            fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.optimizer_config = optimizer
        self.optimizer = build_optimizer(model, optimizer) if optimizer else None

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
        recompute: bool = False,
        init_from_scratch: bool = False,
        seed: int = 1,
    ) -> Engine:
        """Build an engine from a local Hugging Face folder.

        Args:
            path: folder with ``config.json`` and, unless ``init_from_scratch``, safetensors weights.
            layout: how the model is spread, such as ``d1``.
            optimizer: None gives an engine that only scores.
            dtype: of the computation. Parameters, gradients and optimizer states are fp32 in either case.
            max_tokens_per_mb: token budget of a micro-batch; a longer sequence raises it for its step.
            recompute: recompute each layer's activations in backward instead of keeping them.
            init_from_scratch: draw the weights from the config's ``initializer_range`` with ``seed``.

        Raises:
            FileNotFoundError: the folder or its ``config.json`` is missing.
            ValueError: an unsupported model, layout or dtype; weights that do not match the config.
        """
        folder = Path(path)
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}; it is one of {', '.join(_DTYPES)}")
        chosen = torch.device(device) if device is not None else default_device()
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        config = ModelConfig.from_folder(folder)
        with torch.device("meta"):
            model = Decoder(config)
        model.to_empty(device=chosen)
        if init_from_scratch:
            model.init_weights(torch.Generator(chosen).manual_seed(seed))
        else:
            weights.load_folder(model, folder)
        model.recompute = recompute
        return cls(
            model,
            folder=folder,
            layout=layout,
            optimizer=optimizer,
            dtype=_DTYPES[dtype],
            device=chosen,
            max_tokens_per_mb=max_tokens_per_mb,
        )

    @torch.no_grad()
    def forward(self, batch: PackedBatch, what: Sequence[str] = ("logprobs",)) -> TokenOutputs:
        """Score a batch without gradient.

        Args:
            batch: any mask; tokens outside ``loss_mask`` cost no LM-head work and score 0.
            what: fields of TokenOutputs to compute: ``logprobs``, ``entropy``.

        Returns:
            Columns ``[T]`` fp32 on the CPU, in the order of the batch.
        """
        self._check_outputs(what)
        self.model.eval()
        columns = {name: torch.zeros(batch.num_tokens) for name in what}
        for indices in micro_batches(batch, self.max_tokens_per_mb):
            outputs = self._token_outputs(batch.select(indices).to(self.device), what)
            index = batch.token_index(indices)
            for name in what:
                columns[name][index] = getattr(outputs, name).cpu()
        return TokenOutputs(**columns)

    def train_step(self, batch: PackedBatch, loss: LossSpec | LossFn, *, n_minibatches: int = 1) -> dict[str, float]:
        """Train on one batch: ``n_minibatches`` optimizer updates, then ``version`` grows by one.

        The loss finds a sequence column ``current_version`` (fp64): completed steps plus the part of this step's
        updates that is done.

        An update whose gradient is not finite is skipped, named in the log and counted in ``skipped_updates``.

        Returns:
            ``loss`` (mean over updates), ``grad_norm`` (largest over updates, before clipping), ``lr``,
            ``skipped_updates``, ``micro_batches``, and the loss's own metrics as global means.

        Raises:
            RuntimeError: the engine was built without an optimizer.
        """
        if self.optimizer is None or self.optimizer_config is None:
            raise RuntimeError("this engine only scores: build it with optimizer=OptimizerConfig(...) to train")
        loss_fn = loss.build() if isinstance(loss, LossSpec) else loss
        self._check_outputs(loss_fn.outputs)
        learning_rate = self.optimizer_config.lr_at(self.version)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.model.train()
        batch = loss_fn.prepare(batch)
        report = _StepReport()
        shares = mini_batches(batch, n_minibatches)
        for done, indices in enumerate(shares):
            share = batch.select(indices)
            now = torch.full((share.num_sequences,), self.version + done / len(shares), dtype=torch.float64)
            self._update(share.with_sequences(current_version=now), loss_fn, report)
        self.version += 1
        return {**report.metrics(), "lr": learning_rate}

    def _update(self, batch: PackedBatch, loss_fn: LossFn, report: _StepReport) -> None:
        assert self.optimizer is not None and self.optimizer_config is not None
        denominator = loss_fn.denominator(batch)
        if denominator == 0:
            report.skip("no token to train on")
            return
        total = 0.0
        for indices in micro_batches(batch, self.max_tokens_per_mb):
            part = batch.select(indices).to(self.device)
            result = loss_fn(self._token_outputs(part, loss_fn.outputs), part)
            share = result.sum / denominator.to(result.sum)
            if share.requires_grad:
                share.backward()
            total += share.item()
            report.add(result.metrics)
        norm = gradient_norm(self.model.parameters())
        if torch.isfinite(norm):
            if self.optimizer_config.gradient_clipping > 0:
                clip_gradients(self.model.parameters(), norm, self.optimizer_config.gradient_clipping)
            self.optimizer.step()
            report.update(total, float(norm))
        else:
            report.skip(f"gradient of {', '.join(nonfinite_gradients(self.model)[:4])} is not finite")
        self.optimizer.zero_grad(set_to_none=True)

    def _token_outputs(self, batch: PackedBatch, what: Sequence[str]) -> TokenOutputs:
        """Log-probs and entropies of the tokens under the mask, each from the hidden state before it."""
        positions = batch.loss_mask.nonzero().squeeze(-1)
        temperature = None
        if "temperature" in batch.sequences:
            temperature = batch["temperature"].float().repeat_interleave(batch.lengths)
        logprobs, entropy = self.model(
            batch.input_ids,
            batch.position_ids,
            batch.cu_seqlens,
            rows=positions - 1,
            targets=batch.input_ids.roll(-1),
            temperature=temperature,
            with_entropy="entropy" in what,
        )
        blank = torch.zeros(batch.num_tokens, device=self.device)
        return TokenOutputs(
            logprobs=blank.index_put((positions,), logprobs),
            entropy=None if entropy is None else blank.index_put((positions,), entropy),
        )

    def _check_outputs(self, what: Sequence[str]) -> None:
        unknown = [name for name in what if name not in _OUTPUTS]
        if unknown:
            raise ValueError(f"a causal language model gives {' and '.join(_OUTPUTS)}, not {unknown[0]!r}")

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Stream (Hugging Face disk name, CPU tensor), one at a time; ``dtype`` None keeps fp32."""
        return weights.named_weights(self.model, dtype)

    def publish(self) -> Publication:
        """The current weights for inference, at the compute dtype."""
        return Publication(self.version, lambda: self.weights(self.dtype))

    def digest(self) -> str:
        """Digest of the fp32 weights: equal digests mean bit-equal weights."""
        return weights.digest(self.weights())

    def save(self, path: str | Path, kind: Literal["hf", "checkpoint"] = "hf") -> None:
        """Write a Hugging Face folder in the dtype of the source folder, or a checkpoint of the whole training state.

        The folder appears under ``path`` complete or not at all; an existing one is replaced.
        """
        if kind == "checkpoint":
            checkpoint.save(Path(path), self.model, self.optimizer, {"version": self.version})
        else:
            weights.save_folder(Path(path), self.weights(self._folder_dtype()), self.folder)

    def load(self, path: str | Path) -> None:
        """Load what ``save`` wrote: a checkpoint restores weights, optimizer and version; a folder only weights."""
        if checkpoint.is_checkpoint(Path(path)):
            state = checkpoint.load(Path(path), self.model, self.optimizer)
            self.version = int(state["version"])
        else:
            weights.load_folder(self.model, Path(path))

    def health(self) -> dict[str, Any]:
        """Version, layout and peak memory (bytes) of this process."""
        return {
            "version": self.version,
            "layout": str(self.layout),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }

    def _folder_dtype(self) -> torch.dtype:
        values = json.loads((self.folder / "config.json").read_text())
        return _DTYPES.get(values.get("dtype") or values.get("torch_dtype") or "float32", torch.float32)


class _StepReport:
    """Sums of one training step, in fp64."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped = 0
        self.micro_batches = 0

    def add(self, metrics: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.micro_batches += 1
        for name, (value, count) in metrics.items():
            total, number = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + float(value), number + float(count))

    def update(self, loss: float, norm: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)

    def skip(self, reason: str) -> None:
        logger.warning("optimizer update skipped: %s", reason)
        self.skipped += 1

    def metrics(self) -> dict[str, float]:
        means = {name: total / number for name, (total, number) in self.sums.items() if number}
        return {
            **means,
            "loss": sum(self.losses) / len(self.losses) if self.losses else 0.0,
            "grad_norm": max(self.norms, default=0.0),
            "skipped_updates": float(self.skipped),
            "micro_batches": float(self.micro_batches),
        }
