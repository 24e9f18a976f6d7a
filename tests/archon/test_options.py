"""Options: every value outside its range is refused by name, and those at the border are taken."""

from __future__ import annotations

from typing import Any

import pytest

from archon.options import Options


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("context", "Ulysses", "it is one of ulysses, ring"),
        ("pp_schedule", "GPipe", "it is one of 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble"),
        ("reshard_after_forward", True, "it is one of default, always, never"),
        ("ac_mode", "op", "it is one of none, full, selective, memory_budget"),
        ("selective_ac_option", 0, "it is 'op' or a number of layers"),
        ("selective_ac_option", "ops", "it is 'op' or a number of layers"),
        ("selective_ac_option", 1.5, "it is 'op' or a number of layers"),
        ("ac_memory_budget", -0.1, "it is a share from 0 to 1"),
        ("ac_memory_budget", 50, "it is a share from 0 to 1"),
        ("ac_memory_budget", float("nan"), "it is a share from 0 to 1"),
        ("pp_layers_per_stage", 0, "it is a number of layers from 1"),
        ("pp_first_stage_less_layers", -1, "it is a number of layers from 0"),
        ("pp_last_stage_less_layers", -1, "it is a number of layers from 0"),
        ("moe_router_bias_update_rate", -1e-3, "it is 0 or above"),
        ("moe_aux_loss_coeff", -1e-3, "it is 0 or above"),
        ("moe_z_loss_coeff", -1e-3, "it is 0 or above"),
    ],
    ids=str,
)
def test_a_value_outside_its_range_is_refused_by_name(name: str, wrong: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:
        Options(**{name: wrong})
    assert str(error.value) == f"{name} is {wrong!r}; {says}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("selective_ac_option", 1),
        ("ac_memory_budget", 0),
        ("ac_memory_budget", 1),
        ("pp_layers_per_stage", 1),
        ("pp_first_stage_less_layers", 0),
        ("pp_last_stage_less_layers", 0),
        ("moe_router_bias_update_rate", 0),
        ("moe_aux_loss_coeff", 0),
        ("moe_z_loss_coeff", 0),
    ],
    ids=str,
)
def test_a_value_at_its_border_is_taken(name: str, value: Any) -> None:
    assert getattr(Options(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_z_loss_coeff", float("nan")),
        ("pp_layers_per_stage", 1.5),
        ("pp_first_stage_less_layers", 0.5),
        ("compile", True),
        ("deterministic", "no"),
        ("selective_ac_option", True),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        Options(**{name: value})  # type: ignore[arg-type]
