"""A key that nothing reads is a defect: every key of the schema is looked up somewhere in the code that runs."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

import areal
from areal.config import Config

SOURCE = Path(next(iter(areal.__path__)))
NOT_READING = {"config.py", "config_loader.py", "dry_run.py"}
"""Declaring a key, checking it or printing it is not reading it."""


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of the schema by the dotted name that leads to it."""

    def walk(prefix: str, schema: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
        yield prefix, schema
        for name, field in schema.model_fields.items():
            for kind in (field.annotation, *get_args(field.annotation)):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    yield from walk(f"{prefix}.{name}".lstrip("."), kind)

    return walk("", Config)


class Lookups:
    """What the source looks up, as pairs (name of the section or of a variable that holds it, key)."""

    def __init__(self, holders: set[str], classes: dict[str, set[str]]) -> None:
        self.pairs: set[tuple[str, str]] = set()
        self.words: set[str] = set()
        self._holders, self._classes = holders, classes
        self.aliases: dict[str, set[str]] = defaultdict(set)

    def scan(self, tree: ast.AST) -> None:
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                self.words.add(node.attr)
                self.pairs.add((_name(node.value), node.attr))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                self.words.update(node.value.split())
            elif isinstance(node, ast.keyword) and node.arg is None and isinstance(node.value, ast.Call):
                if isinstance(dump := node.value.func, ast.Attribute) and dump.attr == "model_dump":
                    self.pairs.add((_name(dump.value), "*"))  # f(**section.model_dump()) passes every key on
            elif isinstance(node, ast.arg) and node.annotation is not None:
                for name in _names(node.annotation):
                    self.aliases[node.arg] |= self._classes.get(name, set())
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension):
                self._assignment(node)

    def _assignment(self, node: ast.AST) -> None:
        value = getattr(node, "value", None) or getattr(node, "iter", None)
        targets = getattr(node, "targets", None) or [node.target]  # type: ignore[attr-defined]
        if value is None:
            return
        held = self._holders & set(_names(value))
        for target in targets:
            for name in _names(target):
                self.aliases[name] |= held

    def reads(self, holder: str, key: str) -> bool:
        names = {holder} | {alias for alias, held in self.aliases.items() if holder in held}
        return any((name, key) in self.pairs or (name, "*") in self.pairs for name in names)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST) -> list[str]:
    return [_name(child) for child in ast.walk(node) if isinstance(child, ast.Attribute | ast.Name)]


SECTIONS = list(sections())


@pytest.fixture(scope="module")
def lookups() -> Lookups:
    holders = {prefix.rpartition(".")[2] for prefix, _ in SECTIONS if prefix}
    classes: dict[str, set[str]] = defaultdict(set)
    for prefix, schema in SECTIONS:
        classes[schema.__name__].add(prefix.rpartition(".")[2] or "config")
    found = Lookups(holders, classes)
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name not in NOT_READING:
            found.scan(ast.parse(path.read_text()))
    for node in ast.walk(ast.parse((SOURCE / "config.py").read_text())):
        if isinstance(node, ast.FunctionDef) and "property" in map(_name, node.decorator_list):
            found.scan(node)
    return found


@pytest.mark.parametrize(("prefix", "schema"), SECTIONS, ids=[prefix or "top" for prefix, _ in SECTIONS])
def test_every_key_is_read(prefix: str, schema: type[BaseModel], lookups: Lookups) -> None:
    holder = prefix.rpartition(".")[2] or "config"
    owners: dict[str, set[str]] = defaultdict(set)
    for _, other in SECTIONS:
        for key in other.model_fields:
            owners[key].add(other.__name__)
    unread = [
        key
        for key in schema.model_fields
        # A name that only one section has may be looked up by that name alone, as a member or in a list of names.
        if not lookups.reads(holder, key) and not (len(owners[key]) == 1 and key in lookups.words)
    ]
    assert not unread, f"nothing in areal/ reads {[f'{prefix}.{key}'.lstrip('.') for key in unread]}"


def test_the_scan_finds_an_unread_key() -> None:
    source = (
        '"""saver freq_steps"""\n'
        "def f(config, timer: 'TimerConfig'):\n"
        "    section = config.train_dataset\n"
        "    return section.path, timer.freq_secs, f(**config.actor.optimizer.model_dump())\n"
    )
    found = Lookups({"train_dataset", "optimizer", "saver"}, {"TimerConfig": {"saver"}})
    found.scan(ast.parse(source))
    assert found.reads("train_dataset", "path") and found.reads("optimizer", "lr")
    assert not found.reads("train_dataset", "split") and not found.reads("saver", "freq_steps")
    assert "freq_steps" not in found.words
