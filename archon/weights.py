"""Weights under their names on disk: load them into a module, stream them out, save a folder, digest them.

A disk name is the name in a Hugging Face folder. It equals the name in memory with one exception: the experts of a
layer are stacked in memory and one by one on disk.

=====================================================  =================================================
memory                                                 disk, for each expert e
=====================================================  =================================================
``<layer>.mlp.experts.gate_up_proj [E, 2F, D]``        ``<layer>.mlp.experts.<e>.gate_proj.weight [F, D]``
                                                       ``<layer>.mlp.experts.<e>.up_proj.weight [F, D]``
``<layer>.mlp.experts.down_proj [E, D, F]``            ``<layer>.mlp.experts.<e>.down_proj.weight [D, F]``
=====================================================  =================================================

Everything works on any module with these parameter names: ours, transformers' own, sharded (DTensor) or not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from archon.folders import new_folder
from archon.parallel.tensor import assign, assign_block

# Gathering a parameter that two axes shard takes two collectives, which torch warns of each time.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

NamedTensors = Iterable[tuple[str, Tensor]]

EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
BALANCE_BIAS = ".e_score_correction_bias"
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000

_STACKED = re.compile(r"(?P<layer>.+\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<kind>gate_proj|up_proj|down_proj)\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_DERIVED = re.compile(r".+\.rotary_emb\.inv_freq")  # a buffer that old Llama folders hold; the config implies it
_LOADABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class WeightsError(ValueError):
    """Weights and module do not match; the message names every parameter concerned."""


# ---- module → named tensors


@torch.no_grad()
def named_weights(module: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Stream ``(disk name, CPU tensor)`` of every parameter, one parameter gathered at a time; a tied head once.

    A tensor may share memory with the module: copy what must outlive the next optimizer step. With sharded parameters
    this is a collective: every rank iterates to the end.

    Args:
        module: a model with the parameter names of Hugging Face models.
        dtype: cast to it; None keeps the dtype of the parameters.
    """
    for name, tensor in stored_tensors(module):
        yield from split_stack(name, whole_tensor(tensor, dtype).cpu())


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a module and what else belongs into a folder: the balance bias of routers."""
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(BALANCE_BIAS))


def layer_of(name: str) -> int | None:
    """Index of the layer that a name in memory or on disk belongs to; None for embedding, final norm and head."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def whole_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A parameter gathered from all ranks that hold a part of it, cast before it travels."""
    value = tensor.detach().to(dtype or tensor.dtype)
    if not isinstance(value, DTensor):
        return value
    onto_mesh = value.to(value.device_mesh.device_type)  # offloaded shards travel by way of the accelerator
    return onto_mesh.full_tensor() if isinstance(onto_mesh, DTensor) else onto_mesh


def split_stack(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """``(disk name, tensor)`` of a tensor in memory: one for each expert of a stack, else itself."""
    stacked = _STACKED.fullmatch(name)
    if not stacked:
        yield name, value
        return
    for expert, matrix in enumerate(value.unbind()):
        prefix = f"{stacked['layer']}.{expert}"
        if stacked["kind"] == "down_proj":
            yield f"{prefix}.down_proj.weight", matrix
            continue
        gate, up = matrix.unbind() if matrix.ndim == 3 else matrix.chunk(2)
        yield f"{prefix}.gate_proj.weight", gate
        yield f"{prefix}.up_proj.weight", up


# ---- named tensors → module


@torch.no_grad()
def load_named(module: nn.Module | Sequence[nn.Module], named: NamedTensors, *, whole: nn.Module | None = None) -> None:
    """Copy named tensors into a module, each cast to the dtype of its parameter, and account for every parameter.

    Stacked experts under their memory names are accepted too. A head beside a tied embedding must equal it. A critic
    takes the weights of a causal language model: the head is left out, and ``score`` starts at 0. Each rank of a
    layout keeps its own pieces, and of experts reads no others; nothing is communicated.

    Args:
        module: what to fill, or the parts of a pipeline that this process holds.
        named: the tensors of the whole model.
        whole: the whole model, where ``module`` is a part of it; the meta device will do.

    Raises:
        WeightsError: parameters missing, unexpected, given twice, of another shape, in a dtype that is no plain float,
            or a head that differs from the embedding it is tied to. The module may be partly overwritten by then.
    """
    parts = [module] if isinstance(module, nn.Module) else list(module)
    loader = _Loader(parts, whole or parts[0])
    for name, tensor in named:
        loader.add(name, tensor)
    loader.finish()


class _Loader:
    """Places of a model that wait for a tensor, by disk name."""

    def __init__(self, parts: Sequence[nn.Module], whole: nn.Module) -> None:
        self.places: dict[str, list[Tensor]] = {}
        for part in parts:
            for name, tensor in stored_tensors(part):
                self.places.setdefault(name, []).append(tensor)
        on_meta = [name for name, tensors in self.places.items() if tensors[0].is_meta]
        if on_meta:
            raise WeightsError(f"{on_meta[0]} is on the meta device: call module.to_empty(device=…) before loading")
        self.whole = dict(stored_tensors(whole))
        self.shapes = {
            disk: part.shape
            for name, tensor in self.whole.items()
            for disk, part in split_stack(name, torch.empty(tensor.shape, device="meta"))
        }
        self.missing = dict.fromkeys(self.shapes)
        self.tied = HEAD not in self.whole and EMBEDDING in self.whole and SCORE not in self.whole
        self.embedding: Tensor | None = None
        self.head: Tensor | None = None
        self.errors: dict[str, list[str]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in _LOADABLE:
            self._error("in a dtype that needs more than a cast", f"{name} ({tensor.dtype})")
            self.missing.pop(name, None)
        elif name == HEAD and name not in self.whole:
            self.head = tensor
        elif name in self.whole and _STACKED.fullmatch(name):
            for disk, part in split_stack(name, tensor) if self._fits(name, tensor) else ():
                self.add(disk, part)
        elif name not in self.shapes:
            if not _DERIVED.fullmatch(name):
                self._error("unexpected", name)
        elif name not in self.missing:
            self._error("given twice", name)
        else:
            del self.missing[name]
            if tensor.shape == self.shapes[name]:
                self._copy(name, tensor)
            else:
                self._error("of another shape", f"{name} {tuple(tensor.shape)} for {tuple(self.shapes[name])}")

    def _fits(self, name: str, tensor: Tensor) -> bool:
        shape = self.whole[name].shape
        if tensor.shape == shape:
            return True
        self._error("of another shape", f"{name} {tuple(tensor.shape)} for {tuple(shape)}")
        for disk, _ in split_stack(name, torch.empty(shape, device="meta")):
            self.missing.pop(disk, None)
        return False

    def _copy(self, disk: str, tensor: Tensor) -> None:
        if disk == EMBEDDING and self.tied:
            self.embedding = tensor
        expert = _EXPERT.fullmatch(disk)
        if expert is None or disk in self.whole:
            self._assign(disk, tensor)
            return
        kind = "down_proj" if expert["kind"] == "down_proj" else "gate_up_proj"
        name, index = f"{expert['layer']}.{kind}", int(expert["expert"])
        half = int(expert["kind"] == "up_proj")
        for place in self.places.get(name, ()):
            if place.ndim == 4:
                assign_block(place, tensor[None, None], (index, half, 0, 0))
            else:
                assign_block(place, tensor[None], (index, half * tensor.shape[0], 0))

    def _assign(self, name: str, whole: Tensor) -> None:
        for place in self.places.get(name, ()):
            assign(place, whole)

    def _error(self, kind: str, name: str) -> None:
        self.errors.setdefault(kind, []).append(name)

    def finish(self) -> None:
        self._initial_values()
        if self.missing:
            self.errors = {"missing": list(self.missing), **self.errors}
        elif self.tied and self.head is not None and not self._head_equals_embedding():
            self._error("different from the embedding that the config ties it to", HEAD)
        if self.errors:
            raise WeightsError("; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in self.errors.items()))

    def _initial_values(self) -> None:
        """What a pretrained folder need not hold starts at 0: the score of a critic, the balance bias of routers."""
        for name in [name for name in self.missing if name == SCORE or name.endswith(BALANCE_BIAS)]:
            del self.missing[name]
            self._assign(name, torch.zeros(self.shapes[name]))

    def _head_equals_embedding(self) -> bool:
        assert self.head is not None and self.embedding is not None
        # Compared as the parameters hold them: the two may have been saved in different dtypes.
        return self.head.shape == self.embedding.shape and torch.equal(self.head.float(), self.embedding.float())


def _some(names: list[str], limit: int = 10) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# ---- folders


def load_folder(module: nn.Module | Sequence[nn.Module], path: str | Path, *, whole: nn.Module | None = None) -> None:
    """Load the safetensors of a model folder, one file or a sharded index. The folder is only read.

    Raises:
        FileNotFoundError: the folder has no safetensors, or the index names a file that is not there.
        WeightsError: see ``load_named``; the message names the folder.
    """
    try:
        load_named(module, read_folder(path), whole=whole)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error


def read_folder(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Stream ``(disk name, CPU tensor)`` from the safetensors of a model folder.

    Raises:
        FileNotFoundError: the folder has no safetensors, or the index names a file that is not there.
        WeightsError: the index names a tensor that its file does not hold.
    """
    for file, promised in _shards(Path(path)):
        with safe_open(file, framework="pt", device="cpu") as shard:
            names = list(shard.keys())
            absent = sorted(promised.difference(names))
            if absent:
                raise WeightsError(f"{INDEX_FILE} promises tensors that {file.name} does not hold: {_some(absent)}")
            for name in names:
                yield name, shard.get_tensor(name)


def _shards(folder: Path) -> list[tuple[Path, set[str]]]:
    """Weight files of a folder, each with the names that the index promises in it."""
    index = folder / INDEX_FILE
    if index.is_file():
        promised: dict[str, set[str]] = {}
        for name, file in json.loads(index.read_text())["weight_map"].items():
            promised.setdefault(file, set()).add(name)
        absent = [file for file in sorted(promised) if not (folder / file).is_file()]
        if absent:
            raise FileNotFoundError(f"{folder}: {INDEX_FILE} names files that are not there: {_some(absent)}")
        return [(folder / file, promised[file]) for file in sorted(promised)]
    single = folder / SINGLE_FILE
    if single.is_file():
        return [(single, set())]
    raise FileNotFoundError(
        f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not read. "
        "A model without weights needs init_from_scratch"
    )


def save_folder(
    path: str | Path,
    named: NamedTensors,
    config: str | Path | Mapping[str, Any],
    *,
    changes: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder that appears under its name only when it is complete and on the disk.

    An older folder of that name is replaced; see ``archon.folders``.

    Args:
        path: the folder to write; its parents are made.
        named: ``(disk name, CPU tensor)``, as ``named_weights`` gives.
        config: a model folder, whose configuration and tokenizer files are copied, or the content of a ``config.json``.
            The dtype in ``config.json`` becomes that of the tensors.
        changes: entries of ``config.json`` to add or replace.
        max_shard_bytes: start a new file before one grows past this; a larger tensor has a file of its own.
    """
    with new_folder(Path(path)) as work:
        dtypes = _write_shards(work, named, max_shard_bytes)
        _write_configuration(work, config, changes or {}, dtypes)


def _write_shards(folder: Path, named: NamedTensors, max_bytes: int) -> set[torch.dtype]:
    """Write tensors to as many files as needed, and the index if there is more than one. Returns their dtypes."""
    files: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    total = 0

    def flush(shard: dict[str, Tensor]) -> None:
        save_file(shard, folder / f"{len(files)}.part", metadata={"format": "pt"})
        files.append(list(shard))

    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named:
        if shard and size + tensor.nbytes > max_bytes:
            flush(shard)
            shard, size = {}, 0
        # safetensors refuses views of one storage, which the experts of a layer are
        shard[name] = tensor.contiguous() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        size, total = size + tensor.nbytes, total + tensor.nbytes
        if not name.endswith(BALANCE_BIAS):  # fp32 in every folder
            dtypes.add(tensor.dtype)
    flush(shard)
    if len(files) == 1:
        (folder / "0.part").rename(folder / SINGLE_FILE)
        return dtypes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return dtypes


def _write_configuration(
    folder: Path, config: str | Path | Mapping[str, Any], changes: Mapping[str, Any], dtypes: set[torch.dtype]
) -> None:
    if isinstance(config, Mapping):
        content = dict(config)
    else:
        content = json.loads((Path(config) / "config.json").read_text())
        for file in Path(config).iterdir():
            copied = file.suffix in {".json", ".txt", ".model", ".jinja"} and not file.name.endswith(".index.json")
            if copied and file.is_file():
                shutil.copyfile(file, folder / file.name)
    content.update(changes)
    if len(dtypes) == 1:
        key = "torch_dtype" if "torch_dtype" in content else "dtype"
        content[key] = str(next(iter(dtypes))).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


# ---- digests


class Digest:
    """SHA-256 of a set of named tensors, whatever the order they come in.

    Each tensor is hashed as ``<name> NUL <dtype> NUL <sizes joined by commas> NUL <bytes>``, with the dtype named as in
    torch (``bfloat16``) and the elements in row-major order, little endian. The digest is the SHA-256 of the lines
    ``<name> NUL <hex digest>`` sorted by name. So it depends on the dtype that weights travel in.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, str] = {}

    def update(self, name: str, tensor: Tensor) -> None:
        """Add one tensor, of any device and dtype.

        Raises:
            ValueError: the name was added before.
        """
        if name in self._tensors:
            raise ValueError(f"{name} was digested before; a digest holds every name once")
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
        state = hashlib.sha256(f"{name}\0{dtype}\0{shape}\0".encode())
        state.update(flat.numpy().data)
        self._tensors[name] = state.hexdigest()

    def hexdigest(self) -> str:
        """64 hex digits over everything added so far."""
        lines = "\n".join(f"{name}\0{value}" for name, value in sorted(self._tensors.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


def digest(named: NamedTensors) -> str:
    """The ``Digest`` of named tensors."""
    result = Digest()
    for name, tensor in named:
        result.update(name, tensor)
    return result.hexdigest()
