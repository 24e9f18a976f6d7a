from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archon.layout import Coordinates, ExpertCoordinates, Layout, parse_backend

# text, (data, replicas, pipeline, tensor, context, expert, expert_tensor), world size, expert data shards
TABLE = [
    ("d1", (1, 1, 1, 1, 1, 1, 1), 1, 1),
    ("d8", (8, 1, 1, 1, 1, 1, 1), 8, 8),
    ("d4r2", (4, 2, 1, 1, 1, 1, 1), 8, 4),
    ("d4p2t2c2e4", (4, 1, 2, 2, 2, 4, 1), 32, 4),
    ("d2r2p2t2c2e8", (2, 2, 2, 2, 2, 8, 1), 32, 1),
    ("d1t4e2", (1, 1, 1, 4, 1, 2, 1), 4, 2),
    ("(attn:d1p4t2c2|ffn:d1p4t1e4)", (1, 1, 4, 2, 2, 4, 1), 16, 1),
    ("(attn:d4t2|ffn:d2t2e2)", (4, 1, 1, 2, 1, 2, 2), 8, 2),
    ("(attn:d2r3t2|ffn:d1t2e2)", (2, 3, 1, 2, 1, 2, 2), 12, 1),
    ("(attn:d1r2p2c4|ffn:d2p2t2)", (1, 2, 2, 1, 4, 1, 2), 16, 2),
]


@pytest.mark.parametrize(("text", "sizes", "world", "expert_data"), TABLE)
def test_parse_table(text: str, sizes: tuple[int, ...], world: int, expert_data: int) -> None:
    layout = Layout.parse(text)
    assert layout == Layout(*sizes)
    assert (layout.world_size, layout.expert_data) == (world, expert_data)
    assert str(layout) == text


def test_order_and_left_out_letters_do_not_matter() -> None:
    assert Layout.parse("t2p4e4c2") == Layout.parse("d1p4t2c2e4") == Layout.parse(" (attn: p4c2t2 | ffn: e4p4) ")


def test_missing_ffn_data_is_derived() -> None:
    layout = Layout.parse("(attn:d4p2t2c2|ffn:p2t2e2)")
    assert layout.expert_data == 4
    assert str(layout) == "(attn:d4p2t2c2|ffn:d4p2t2e2)"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "nothing is written"),
        ("d0", "'d0' has no size"),
        ("d", "'d' has no size"),
        ("d4x2", "'x' is no axis"),
        ("D4", "'D' is no axis"),
        ("d4 t2", "cannot read ' t2'"),
        ("4d", "cannot read '4d'"),
        ("d-1", "'d' has no size"),
        ("d2t2d4", "d is written twice; keep one of d2 and d4"),
        ("d2e4", "e4 does not divide the d2 x c1 x t1 = 2 ranks of one stage and replica: choose e from 1, 2"),
        ("d4r2e8", "e8 does not divide the d4 x c1 x t1 = 4 ranks"),
        ("d6e4", "choose e from 1, 2, 3, 6"),
        ("(attn:d2)", "with both parts"),
        ("attn:d2|ffn:e2", "with both parts"),
        ("(attn:d2|ffn:)", "ffn part: nothing is written"),
        ("(attn:d2e2|ffn:d2)", "e (expert) is not written in attn; write it in ffn"),
        ("(attn:d4|ffn:d2c2)", "c (context) is not written in ffn; write it in attn"),
        ("(attn:d2r2|ffn:d2r2)", "r (replicas) is not written in ffn; write it in attn"),
        ("(attn:d2p2|ffn:d2)", "attn has p2 and ffn p1"),
        ("(attn:d4t2|ffn:d4t1e4)", "attn uses 8 ranks and ffn 16, but both use all ranks: write d2 in ffn"),
        ("(attn:d4t2|ffn:t3)", "ffn t3 does not divide the d4 x c1 x t2 = 8 ranks of one stage and replica"),
        ("(attn:d2t2|ffn:t2e4)", "split by ffn t2: choose e from 1, 2"),
    ],
)
def test_refusals_say_what_to_change(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        Layout.parse(text)
    assert sentence in str(error.value)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline is 0"):
        Layout(pipeline=0)


def test_parse_backend() -> None:
    assert parse_backend("archon:d4t2") == ("archon", Layout(data=4, tensor=2))
    assert parse_backend("fsdp:d8") == ("fsdp", Layout(data=8))
    engine, layout = parse_backend("archon:(attn:d1p4t2c2|ffn:d1p4t1e4)")
    assert (engine, str(layout)) == ("archon", "(attn:d1p4t2c2|ffn:d1p4t1e4)")
    assert parse_backend("archon:p2t2") == ("archon", Layout(pipeline=2, tensor=2))
    for text in ("d4t2", "archon", "archon:", ":d4", "(attn:d1|ffn:d1)", ""):
        with pytest.raises(ValueError, match="engine's name"):
            parse_backend(text)


def test_dense_coordinates_table() -> None:
    """p outermost, then r, d, c, and t innermost: written out by hand for 2 stages, 2 replicas, 2 of each other."""
    layout = Layout.parse("d2r2p2t2c2")
    table = {
        0: (0, 0, 0, 0, 0),
        1: (0, 0, 0, 0, 1),
        2: (0, 0, 0, 1, 0),
        4: (0, 0, 1, 0, 0),
        8: (0, 1, 0, 0, 0),
        13: (0, 1, 1, 0, 1),
        16: (1, 0, 0, 0, 0),
        31: (1, 1, 1, 1, 1),
    }
    for rank, coordinates in table.items():
        assert layout.coordinates(rank) == coordinates
        assert layout.rank(Coordinates(*coordinates)) == rank


def test_expert_coordinates_table() -> None:
    """Eight ranks d2c2t2 of one stage fold as ed2 e2 et2: et innermost, then e."""
    layout = Layout.parse("(attn:d2p2t2c2|ffn:d2p2t2e2)")
    folds = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    for stage in (0, 1):
        for j, fold in enumerate(folds):
            rank = stage * 8 + j
            assert layout.expert_coordinates(rank) == (stage, 0, *fold)
            assert layout.expert_rank(ExpertCoordinates(stage, 0, *fold)) == rank


@pytest.mark.parametrize(
    ("text", "rank", "dense", "experts"),
    [
        # Experts borrow the context ranks: the same rank is context 1 of 2 and expert 1 of 2.
        ("d2c2e2", 1, (0, 0, 0, 1, 0), (0, 0, 0, 1, 0)),
        ("d2c2e2", 2, (0, 0, 1, 0, 0), (0, 0, 1, 0, 0)),
        # They borrow data, context and tensor at once, within their own stage and replica.
        ("d2r2p2t2c2e8", 7, (0, 0, 1, 1, 1), (0, 0, 0, 7, 0)),
        ("d2r2p2t2c2e8", 8, (0, 1, 0, 0, 0), (0, 1, 0, 0, 0)),
        ("d2r2p2t2c2e8", 29, (1, 1, 1, 0, 1), (1, 1, 0, 5, 0)),
        ("d2r2p2t2c2e8", 31, (1, 1, 1, 1, 1), (1, 1, 0, 7, 0)),
        # Split experts: the dense t and the ffn t need not agree.
        ("(attn:d1r2p2c4|ffn:d2p2t2)", 6, (0, 1, 0, 2, 0), (0, 1, 1, 0, 0)),
        ("(attn:d1r2p2c4|ffn:d2p2t2)", 15, (1, 1, 0, 3, 0), (1, 1, 1, 0, 1)),
        ("(attn:d1p4t2c2|ffn:d1p4t1e4)", 13, (3, 0, 0, 0, 1), (3, 0, 0, 1, 0)),
        ("(attn:d2r3t2|ffn:d1t2e2)", 10, (0, 2, 1, 0, 0), (0, 2, 0, 1, 0)),
    ],
)
def test_one_rank_in_both_views(text: str, rank: int, dense: tuple[int, ...], experts: tuple[int, ...]) -> None:
    layout = Layout.parse(text)
    assert (layout.coordinates(rank), layout.expert_coordinates(rank)) == (dense, experts)
    assert layout.rank(Coordinates(*dense)) == layout.expert_rank(ExpertCoordinates(*experts)) == rank


@pytest.mark.parametrize(
    ("text", "axes", "groups"),
    [
        ("d2t2", ("t",), [(0, 1), (2, 3)]),
        ("d2t2", ("d",), [(0, 2), (1, 3)]),
        ("d2t2", ("d", "t"), [(0, 1, 2, 3)]),
        ("d2t2", ("r",), [(0,), (1,), (2,), (3,)]),
        ("d2p2c2", ("p",), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("d2p2c2", ("c",), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("d2p2c2", ("d", "c"), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("d2r2", ("r",), [(0, 2), (1, 3)]),
        # Experts over 4 of the 8 ranks d4t2, not split by t: expert groups are consecutive ranks.
        ("d4t2e4", ("e",), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("d4t2e4", ("ed",), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        # The same with every expert split by two.
        ("(attn:d4t2|ffn:d2t2e2)", ("et",), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("(attn:d4t2|ffn:d2t2e2)", ("e",), [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("(attn:d4t2|ffn:d2t2e2)", ("ed",), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("d2r2e2", ("r", "ed"), [(0, 2), (1, 3)]),
        # Everyone who holds the same weights, or another part of the batch: replicas, data and context together.
        ("d2r2c2", ("r", "d", "c"), [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("d1r2t2c2", ("r", "d", "c"), [(0, 2, 4, 6), (1, 3, 5, 7)]),
        # Experts never reach beyond their replica or stage.
        ("d2r2e2", ("e",), [(0, 1), (2, 3)]),
        ("d1p2c2e2", ("e",), [(0, 1), (2, 3)]),
        ("(attn:d1r2c4|ffn:t2e2)", ("e", "et"), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("(attn:d1r2c4|ffn:t2e2)", ("r", "ed"), [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ],
)
def test_groups_table(text: str, axes: tuple[str, ...], groups: list[tuple[int, ...]]) -> None:
    assert Layout.parse(text).groups(*axes) == groups


@pytest.mark.parametrize("axes", [(), ("x",), ("d", "e"), ("t", "ed")])
def test_groups_refuses_unknown_or_mixed_axes(axes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="dense axes p, r, d, c, t"):
        Layout.parse("d2e2").groups(*axes)


def test_ranks_and_coordinates_outside_the_layout_are_refused() -> None:
    layout = Layout.parse("d2t2")
    with pytest.raises(ValueError, match="rank 4 does not exist; its ranks are 0 to 3"):
        layout.coordinates(4)
    with pytest.raises(ValueError, match="rank -1 does not exist"):
        layout.expert_coordinates(-1)
    with pytest.raises(ValueError, match="coordinate 2 lies outside axis t of size 2"):
        layout.rank(Coordinates(0, 0, 0, 0, 2))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any valid layout: the experts' shape is drawn first, then the dense axes that hold it."""
    size = st.integers(1, 4)
    expert, expert_tensor, context, tensor = draw(size), draw(size), draw(size), draw(size)
    return Layout(
        data=draw(size) * expert * expert_tensor,
        replicas=draw(size),
        pipeline=draw(size),
        tensor=tensor,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        hybrid=draw(st.booleans()),
    )


@given(layouts())
def test_text_round_trip(layout: Layout) -> None:
    again = Layout.parse(str(layout))
    assert again == layout
    assert str(again) == str(layout)
    assert hash(again) == hash(layout)


@given(layouts(), st.data())
def test_rank_round_trip(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert layout.rank(layout.coordinates(rank)) == rank
    assert layout.expert_rank(layout.expert_coordinates(rank)) == rank
    # Stage and replica are the same in both views.
    assert layout.coordinates(rank)[:2] == layout.expert_coordinates(rank)[:2]


@given(layouts())
def test_groups_partition_the_ranks(layout: Layout) -> None:
    everyone = list(range(layout.world_size))
    for sizes in (layout.axes, layout.expert_axes):
        for axis, size in sizes.items():
            groups = layout.groups(axis)
            assert sorted(rank for group in groups for rank in group) == everyone
            assert all(len(group) == size and list(group) == sorted(group) for group in groups)
            assert groups == sorted(groups)


def test_needs_no_torch() -> None:
    """The CLI parses layouts before anything heavy is loaded."""
    code = "import runpy, sys; runpy.run_path('archon/layout.py'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
