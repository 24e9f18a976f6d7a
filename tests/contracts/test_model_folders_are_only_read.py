"""Loading from, and exporting beside, a read-only model folder (a shared cache) works and leaves it untouched."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import build

from archon.models.config import ModelConfig
from archon.models.decoder import Decoder
from archon.weights import digest, load_folder, named_weights, read_folder, save_folder


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "cache"
    build("qwen3_moe").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


def state(folder: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_mtime_ns, file.stat().st_size) for file in [folder, *folder.iterdir()]}


def test_load_and_export(read_only: Path, tmp_path: Path) -> None:
    before = state(read_only)
    model = Decoder(ModelConfig.from_folder(read_only))
    load_folder(model, read_only)
    save_folder(tmp_path / "export", named_weights(model), read_only)
    assert state(read_only) == before
    assert digest(read_folder(tmp_path / "export")) == digest(read_folder(read_only))
    for file in (tmp_path / "export").iterdir():
        assert file.stat().st_mode & stat.S_IWUSR and os.access(file, os.W_OK), f"{file.name} inherited read-only"
