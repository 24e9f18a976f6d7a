"""Where a model and its tokenizer come from: a folder, the hub, or a GGUF file inside an installed package."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE_PREFIX = "package:"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class ModelNotFound(ValueError):
    """A model path leads to no usable model; the message says what is missing and how to go on."""


def resolve_model(path: str | Path, cache_dir: str | Path) -> Path:
    """The folder, as Hugging Face lays it out, of the model that ``path`` names.

    Args:
        path: a folder with ``config.json``; a ``.gguf`` file; ``package:NAME`` or ``package:NAME/FILE.gguf``, a GGUF
            file inside an installed Python package (which is not imported); or a hub id such as ``Qwen/Qwen3-0.6B``.
        cache_dir: where a GGUF file is unpacked, once, as bf16 safetensors.

    Raises:
        ModelNotFound: none of these, or incomplete.
    """
    name = str(path)
    if name.startswith(PACKAGE_PREFIX):
        return unpack_gguf(_file_in_package(name.removeprefix(PACKAGE_PREFIX)), Path(cache_dir))
    local = Path(name).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            found = ", ".join(sorted(entry.name for entry in local.iterdir())[:8]) or "nothing"
            raise ModelNotFound(
                f"model folder {name!r} has no config.json (it holds {found}); give a Hugging Face folder"
            )
        return local
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ModelNotFound(f"there is no GGUF file {name!r}")
        return unpack_gguf(local, Path(cache_dir))
    if HUB_ID.fullmatch(name) is None or name.startswith("."):
        raise ModelNotFound(f"model {name!r} is no folder, no .gguf file, no package: name and no hub id")
    return _from_hub(name)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder. It is for one asyncio loop: fast tokenizers do not bear concurrent threads.

    Raises:
        ModelNotFound: the folder has none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"folder {str(path)!r} holds no tokenizer that transformers can load: {error}") from error


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens of a conversation, ready for the assistant's next turn.

    The tokenizer's chat template decides; without one the contents are joined by newlines and encoded as plain text.
    """
    if tokenizer.chat_template is None:
        text = "\n".join(message["content"] for message in messages)
        return list(tokenizer(text)["input_ids"])
    return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))


def answer_ids(tokenizer: Any, answer: str) -> list[int]:
    """The tokens of an answer as a policy should sample it after ``render``: its text and the end of the sequence.

    Raises:
        ValueError: the tokenizer has no end-of-sequence token, so nothing could end an answer.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("this tokenizer has no eos_token, so no answer can end; set it in tokenizer_config.json")
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def unpack_gguf(file: Path, cache_dir: Path) -> Path:
    """Dequantise a GGUF file into a Hugging Face folder with bf16 safetensors, tokenizer and chat template.

    The folder's name holds a digest of the file and appears by one rename, so an existing one is complete and reused.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    target = cache_dir / f"{file.stem}-{digest}"
    if target.is_dir():
        return target
    partial = cache_dir / f".{target.name}.{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        _convert_gguf(file, partial)
        try:
            os.rename(partial, target)
        except OSError:
            if not target.is_dir():  # not that another process finished first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert_gguf(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantised = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # The loaded model stays marked as quantised and refuses to be saved: a clean one takes its weights.
    settings = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "model_type", "transformers_version", "architectures"):
        settings.pop(key, None)
    model = type(quantised)(type(quantised.config)(**settings))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.config.architectures = [type(model).__name__]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _file_in_package(name: str) -> Path:
    package, _, file = name.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.submodule_search_locations is None:
        distribution = package.replace("_", "-")
        raise ModelNotFound(f"Python package {package!r} is not installed; pip install {distribution}")
    folders = [Path(location) for location in spec.submodule_search_locations]
    if file:
        found = [folder / file for folder in folders if (folder / file).is_file()]
    else:
        found = [path for folder in folders for path in sorted(folder.rglob("*.gguf"))]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ModelNotFound(
            f"package {package!r} should hold one {file or '.gguf file'}, found {names}; "
            f"write {PACKAGE_PREFIX}{package}/FILE.gguf"
        )
    return found[0]


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "original/*", "*.gguf"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFound(
            f"model {name!r} is no folder here and cannot be fetched from the hub ({type(error).__name__}: {error}); "
            "check the name, log in with `hf auth login` if it is gated, or give a downloaded folder"
        ) from error
