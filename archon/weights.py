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
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from archon.folders import new_folder

NamedTensors = Iterable[tuple[str, Tensor]]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000

_STACKED = re.compile(r"(?P<layer>.+\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<kind>gate_proj|up_proj|down_proj)\.weight")
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
    for name, parameter in module.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        yield from _split(name, value.to("cpu", dtype or value.dtype))


def _split(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    stacked = _STACKED.fullmatch(name)
    if not stacked:
        yield name, value
        return
    for expert, matrix in enumerate(value.unbind()):
        prefix = f"{stacked['layer']}.{expert}"
        if stacked["kind"] == "down_proj":
            yield f"{prefix}.down_proj.weight", matrix
            continue
        gate, up = matrix.chunk(2)
        yield f"{prefix}.gate_proj.weight", gate
        yield f"{prefix}.up_proj.weight", up


# ---- named tensors → module


@torch.no_grad()
def load_named(module: nn.Module, named: NamedTensors) -> None:
    """Copy named tensors into a module, each cast to the dtype of its parameter, and account for every parameter.

    Stacked experts under their memory names are accepted too. A head beside a tied embedding must equal it.

    Raises:
        WeightsError: parameters missing, unexpected, given twice, of another shape, in a dtype that is no plain float,
            or a head that differs from the embedding it is tied to. The module may be partly overwritten by then.
    """
    loader = _Loader(module)
    for name, tensor in named:
        loader.add(name, tensor)
    loader.finish()


class _Loader:
    """Places of a module that wait for a tensor, by disk name."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = dict(module.named_parameters())
        on_meta = [name for name, parameter in self.parameters.items() if parameter.is_meta]
        if on_meta:
            raise WeightsError(f"{on_meta[0]} is on the meta device: call module.to_empty(device=…) before loading")
        self.shapes = {
            disk: part.shape
            for name, parameter in self.parameters.items()
            for disk, part in _split(name, torch.empty(parameter.shape, device="meta"))
        }
        self.missing = dict.fromkeys(self.shapes)
        self.tied = HEAD not in self.parameters and EMBEDDING in self.parameters
        self.head: Tensor | None = None
        self.gathered: dict[str, Tensor] = {}
        self.errors: dict[str, list[str]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in _LOADABLE:
            self._error("in a dtype that needs more than a cast", f"{name} ({tensor.dtype})")
            self.missing.pop(name, None)
        elif self.tied and name == HEAD:
            self.head = tensor
        elif name in self.parameters and _STACKED.fullmatch(name):
            for disk, part in _split(name, tensor) if self._fits(name, tensor) else ():
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
        shape = self.parameters[name].shape
        if tensor.shape == shape:
            return True
        self._error("of another shape", f"{name} {tuple(tensor.shape)} for {tuple(shape)}")
        for disk, _ in _split(name, torch.empty(shape, device="meta")):
            self.missing.pop(disk, None)
        return False

    def _copy(self, disk: str, tensor: Tensor) -> None:
        expert = _EXPERT.fullmatch(disk)
        if expert is None or disk in self.parameters:
            self._assign(disk, tensor)
            return
        kind = "down_proj" if expert["kind"] == "down_proj" else "gate_up_proj"
        name, index = f"{expert['layer']}.{kind}", int(expert["expert"])
        parameter = self.parameters[name]
        whole: Tensor = parameter.detach()
        if isinstance(parameter, DTensor):
            # A shard is cut from the whole stack, so the stack is put together first.
            whole = self.gathered.setdefault(name, torch.empty(parameter.shape, dtype=parameter.dtype))
        part = whole[index] if kind == "down_proj" else whole[index].chunk(2)[expert["kind"] == "up_proj"]
        part.copy_(tensor)
        if name in self.gathered and not any(disk in self.missing for disk, _ in _split(name, whole)):
            self._assign(name, self.gathered.pop(name))

    def _assign(self, name: str, tensor: Tensor) -> None:
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            value = tensor.to(parameter.device, parameter.dtype)
            # Every rank holds the whole tensor and cuts its own shard; no rank sends.
            tensor = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.detach().copy_(tensor)

    def _error(self, kind: str, what: str) -> None:
        self.errors.setdefault(kind, []).append(what)

    def finish(self) -> None:
        if self.missing:
            self.errors = {"missing": list(self.missing), **self.errors}
        elif self.head is not None and not self._head_equals_embedding():
            self._error("different from the embedding that the config ties it to", HEAD)
        if self.errors:
            raise WeightsError("; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in self.errors.items()))

    def _head_equals_embedding(self) -> bool:
        assert self.head is not None
        parameter = self.parameters[EMBEDDING]
        embedding = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        head = self.head.to(embedding.device, embedding.dtype)
        return head.shape == embedding.shape and torch.equal(head, embedding)


def _some(names: list[str], limit: int = 10) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# ---- folders


def load_folder(module: nn.Module, path: str | Path) -> None:
    """Load the safetensors of a model folder, one file or a sharded index. The folder is only read.

    Raises:
        FileNotFoundError: the folder has no safetensors, or the index names a file that is not there.
        WeightsError: see ``load_named``; the message names the folder.
    """
    try:
        load_named(module, read_folder(path))
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
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder that appears under its name only when it is complete and on the disk.

    An older folder of that name is moved aside until the new one has taken its place, then deleted.

    Args:
        path: the folder to write; its parents are made.
        named: ``(disk name, CPU tensor)``, as ``named_weights`` gives.
        config: a model folder, whose configuration and tokenizer files are copied, or the content of a ``config.json``.
            The dtype in ``config.json`` becomes that of the tensors.
        max_shard_bytes: start a new file before one grows past this; a larger tensor has a file of its own.
    """
    with new_folder(Path(path)) as work:
        dtypes = _write_shards(work, named, max_shard_bytes)
        _write_configuration(work, config, dtypes)


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


def _write_configuration(folder: Path, config: str | Path | Mapping[str, Any], dtypes: set[torch.dtype]) -> None:
    if isinstance(config, Mapping):
        content = dict(config)
    else:
        content = json.loads((Path(config) / "config.json").read_text())
        for file in Path(config).iterdir():
            copied = file.suffix in {".json", ".txt", ".model", ".jinja"} and not file.name.endswith(".index.json")
            if copied and file.is_file():
                shutil.copyfile(file, folder / file.name)
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
