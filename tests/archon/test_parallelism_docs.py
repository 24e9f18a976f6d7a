"""docs/parallelism.md says what is so: its table, its picture, its refusal, and the tests it cites."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from archon.layout import Layout
from archon.models.config import ModelConfig
from archon.options import Options
from archon.parallel.fit import LayoutMisfit, check_fit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parallelism.md").read_text()
LAYOUT = Layout.parse("d2c2t2e4")


def test_every_cited_file_exists() -> None:
    cited = set(re.findall(r"`((?:tests|archon|docs)/[\w/.]+)`", PAGE)) | {
        f"docs/{path}" for path in re.findall(r"\]\((images/[\w.]+)\)", PAGE)
    }
    assert len(cited) >= 8
    assert [path for path in sorted(cited) if not (ROOT / path).exists()] == []


def test_every_option_of_the_table_exists() -> None:
    table = PAGE.split("| option |")[1].split("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(names) >= 8
    assert set(names) <= set(Options.__dataclass_fields__)


def test_the_table_of_ranks_is_the_layouts_arithmetic() -> None:
    rows = re.findall(r"^\| (\d)" + r" \| (\d)" * 8 + r" \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == LAYOUT.world_size
    for rank, p, r, d, c, t, expert_data, e, expert_tensor in (map(int, row) for row in rows):
        assert LAYOUT.coordinates(rank) == (p, r, d, c, t)
        assert LAYOUT.expert_coordinates(rank) == (p, r, expert_data, e, expert_tensor)


def test_the_picture_shows_the_same_ranks() -> None:
    picture = (ROOT / "docs" / "images" / "mesh.svg").read_text()
    box = r">rank (\d)<.*?>attention d(\d) c(\d) t(\d)<.*?>experts ed(\d) e(\d)<"
    boxes = re.findall(box, picture, flags=re.DOTALL)
    assert len(boxes) == LAYOUT.world_size
    for rank, d, c, t, expert_data, e in (map(int, found) for found in boxes):
        assert LAYOUT.coordinates(rank) == (0, 0, d, c, t)
        assert LAYOUT.expert_coordinates(rank) == (0, 0, expert_data, e, 0)


def test_the_refusal_is_what_the_quickstart_model_gets() -> None:
    config = ModelConfig.from_folder(ROOT / "configs" / "models" / "tiny_qwen3_moe")
    with pytest.raises(LayoutMisfit) as refused:
        check_fit(Layout.parse("d1t3"), config, Options())
    assert str(refused.value) in PAGE
