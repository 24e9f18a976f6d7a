"""Folders that take their name complete or not at all."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from archon import folders
from archon.folders import make_work_folder, new_folder, replace_folder


def fill(path: Path, content: str) -> None:
    with new_folder(path) as work:
        (work / "deep").mkdir()
        (work / "deep" / "file").write_text(content)


def content(path: Path) -> str:
    return (path / "deep" / "file").read_text()


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture(params=["exchanged", "moved aside"])
def replacing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to replace a folder: in one step, and where the filesystem cannot do that."""
    if request.param == "moved aside":
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    return request.param


def test_a_folder_appears_with_its_parents_and_is_replaced(tmp_path: Path, replacing: str) -> None:
    path = tmp_path / "runs" / "step_1"
    for text in ("old", "new"):
        fill(path, text)
        assert content(path) == text and names(path.parent) == ["step_1"]
    assert path.stat().st_mode & 0o777 == 0o755


def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path: Path, replacing: str) -> None:
    path = tmp_path / "step_1"
    fill(path, "old")
    with pytest.raises(ValueError, match="disk"), new_folder(path) as work:
        (work / "half").write_text("new")
        raise ValueError("disk")
    assert content(path) == "old" and names(tmp_path) == ["step_1"]


@pytest.mark.skipif(sys.platform != "linux", reason="names can be exchanged on Linux only")
def test_there_is_no_moment_without_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step_1"
    fill(path, "old")
    renamed = []
    monkeypatch.setattr(os, "rename", lambda *names: renamed.append(names))
    fill(path, "new")
    assert content(path) == "new" and renamed == []


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step_1"
    fill(path, "old")
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.suffix == ".new":
            raise OSError(errno.EIO, "disk")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="disk"):
        fill(path, "new")
    assert content(path) == "old" and names(tmp_path) == ["step_1"]


@pytest.mark.skipif(sys.platform != "linux", reason="names can be exchanged on Linux only")
def test_names_that_cannot_be_exchanged_are_errors(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError, match="absent"):
        folders._exchange(tmp_path / "one", tmp_path / "absent")


def test_what_a_killed_writer_left_goes_with_the_next_of_its_name(tmp_path: Path, replacing: str) -> None:
    for name in ("step_1", "step_1.b", "step_10"):
        (make_work_folder(tmp_path / name) / "half").write_text("killed")
    fill(tmp_path / "step_1", "old")
    hidden = [name for name in names(tmp_path) if name.startswith(".")]
    assert [name.rsplit(".", 2)[0] for name in hidden] == [".step_1.b", ".step_10"]
    aside = tmp_path / f"{make_work_folder(tmp_path / 'step_1').name}.old"
    aside.mkdir()
    fill(tmp_path / "step_1", "new")
    assert [name for name in names(tmp_path) if name.startswith(".")] == hidden


def test_content_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(folders, "fsync", lambda path: steps.append(path.name))
    monkeypatch.setattr(folders, "replace_folder", lambda work, path: steps.append("name"))
    with new_folder(tmp_path / "step_1") as work:
        (work / "file").write_text("new")
    assert steps == ["file", work.name, "name"]
    monkeypatch.undo()
    monkeypatch.setattr(folders, "fsync", lambda path: steps.append(path.name))
    replace_folder(make_work_folder(tmp_path / "step_1"), tmp_path / "step_1")
    assert steps[-1] == tmp_path.name
