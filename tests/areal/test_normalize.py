"""Normalisation per option against a plain Python computation over lists."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.algorithms.normalize import NormSpec, normalize

VALUES = [0.0, 1.0, 0.25, 3.0, -2.0, 0.5, 0.125, 4.0]
GROUPS = [7, 7, 7, -3, -3, 100, 100, 100]


def expected(values: list[float], groups: list[int], spec: NormSpec) -> list[float]:
    def members(index: int, level: str | None) -> list[int]:
        return [j for j in range(len(values)) if level == "batch" or groups[j] == groups[index]]

    result = []
    for i, x in enumerate(values):
        if spec.mean_level is not None:
            others = [j for j in members(i, spec.mean_level) if not (spec.mean_leave1out and j == i)]
            x = x - statistics.fmean(values[j] for j in others) if others else 0.0
        if spec.std_level is not None:
            around = [values[j] for j in members(i, spec.std_level)]
            if len(set(around)) == 1:
                x = 0.0
            else:
                x = x / ((statistics.stdev if spec.std_unbiased else statistics.pstdev)(around) + spec.eps)
        result.append(x)
    return result


@pytest.mark.parametrize(
    ("mean_level", "std_level", "leave1out", "unbiased"),
    [
        options
        for options in itertools.product(
            ["batch", "group", None], ["batch", "group", None], [False, True], [False, True]
        )
        if not (options[0] is None and options[2])
    ],
)
def test_every_option_against_plain_python(
    mean_level: str | None, std_level: str | None, leave1out: bool, unbiased: bool
) -> None:
    spec = NormSpec(mean_level, leave1out, std_level, unbiased)
    got = normalize(torch.tensor(VALUES, dtype=torch.float64), spec, groups=torch.tensor(GROUPS))
    torch.testing.assert_close(got, torch.tensor(expected(VALUES, GROUPS, spec), dtype=torch.float64))


@given(
    rows=st.lists(st.tuples(st.floats(-20, 20), st.integers(0, 4), st.booleans()), min_size=1, max_size=30),
    mean_level=st.sampled_from(["batch", "group", None]),
    std_level=st.sampled_from(["batch", "group", None]),
    leave1out=st.booleans(),
    seed=st.integers(0, 100),
)
def test_masked_rows_are_absent_and_order_does_not_matter(
    rows: list[tuple[float, int, bool]], mean_level: str | None, std_level: str | None, leave1out: bool, seed: int
) -> None:
    spec = NormSpec(mean_level, leave1out and mean_level is not None, std_level)
    values = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    groups = torch.tensor([row[1] for row in rows])
    mask = torch.tensor([row[2] for row in rows])
    alone = normalize(values[mask], spec, groups=groups[mask])
    junk = torch.where(mask, values, torch.nan)
    got = normalize(junk, spec, mask=mask, groups=groups)
    torch.testing.assert_close(got[mask], alone, rtol=0, atol=0)
    assert (got[~mask] == 0).all()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    shuffled = normalize(junk[order], spec, mask=mask[order], groups=groups[order])
    torch.testing.assert_close(shuffled, got[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.7])
@pytest.mark.parametrize("leave1out", [False, True])
@pytest.mark.parametrize("levels", [("batch", "batch"), ("group", "group"), ("group", None), ("group", "batch")])
def test_a_single_value_normalises_to_zero(levels: tuple[str, str | None], leave1out: bool, value: float) -> None:
    got = normalize(torch.tensor([value]), NormSpec(levels[0], leave1out, levels[1]), groups=torch.tensor([4]))
    assert got.tolist() == [0.0]


def test_single_value_group_with_batch_mean_and_group_std_does_not_explode() -> None:
    got = normalize(torch.tensor([0.0, 1.0, 5.0]), NormSpec("batch", False, "group"), groups=torch.tensor([0, 0, 1]))
    assert got[2] == 0 and got.abs().max() < 5


def test_statistics_keep_fp64_digits_of_large_values() -> None:
    values = torch.tensor([4096.0, 4096.5, 4097.0])
    got = normalize(values, NormSpec(eps=0.0))
    torch.testing.assert_close(got, torch.tensor([-1.0, 0.0, 1.0]), rtol=0, atol=0)


def test_an_entry_of_many_values_weighs_one() -> None:
    values = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    entries = torch.tensor([5, 5, 5, 5, 6, 7])
    per_entry = normalize(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), NormSpec())
    got = normalize(values, NormSpec(), entries=entries)
    torch.testing.assert_close(got, per_entry[[0, 0, 0, 0, 1, 2]])
    rloo = normalize(values, NormSpec("batch", True, None), entries=entries)
    torch.testing.assert_close(rloo, torch.tensor([1.0, 1.0, 1.0, 1.0, -0.5, -0.5], dtype=torch.float64))


def test_nothing_under_the_mask_gives_zeros() -> None:
    assert normalize(torch.full((3,), torch.nan), NormSpec(), mask=torch.zeros(3, dtype=torch.bool)).tolist() == [0] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mean_level": "token"}, "mean_level is 'token'"),
        ({"std_level": "sequence"}, "std_level is 'sequence'"),
        ({"mean_level": None, "mean_leave1out": True}, "mean_leave1out needs a mean_level"),
        ({"eps": -1.0}, "eps is -1.0"),
    ],
)
def test_wrong_options_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NormSpec(**arguments)


def test_group_level_needs_group_ids() -> None:
    with pytest.raises(ValueError, match="pass groups"):
        normalize(torch.ones(2), NormSpec("group"))
