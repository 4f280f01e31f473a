"""What is allowed, and which difference is the worst."""

from __future__ import annotations

import math

import pytest

from oases_hf.verify.outcome import MULTIPLE, Row, compare, compare_losses, larger, least_update, relative

LEAST = dict.fromkeys("abc", 1e-6)


def test_relative_to_the_own_norm_and_a_little_of_all() -> None:
    found = relative({"a": 0.5, "b": 0.5}, {"a": 4.0, "b": 3.0}, floor=0.2)
    assert found == {"a": pytest.approx(0.1), "b": pytest.approx(0.125)}


def test_nothing_of_nothing_is_no_difference_and_something_is() -> None:
    assert relative({"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}) == {"a": 0.0, "b": math.inf}


def test_the_worst_is_that_which_exceeds_what_is_allowed_of_it() -> None:
    row = compare("gradients", 1, {"a": 0.5, "b": 0.1, "c": 0.0}, {"a": 0.1, "b": 1e-5, "c": 0.0}, LEAST)
    assert row == Row("gradients", 1, 0.1, 1e-5, MULTIPLE["gradients"] * 1e-5, "b")
    assert not row.ok


def test_noise_that_is_small_by_luck_counts_as_the_median() -> None:
    row = compare("gradients", 1, {"a": 5e-3, "b": 0.0, "c": 0.0}, {"a": 0.0, "b": 1e-3, "c": 2e-3}, LEAST)
    assert row.ok
    assert (row.parameter, row.noise, row.allowed) == ("a", 0.0, MULTIPLE["gradients"] * 1e-3)


def test_without_noise_the_least_is_allowed() -> None:
    noise = dict.fromkeys("abc", 0.0)
    assert compare("gradients", 1, {"a": 1e-6, "b": 0.0, "c": 0.0}, noise, LEAST).ok
    assert not compare("gradients", 1, {"a": 1.1e-6, "b": 0.0, "c": 0.0}, noise, LEAST).ok


def test_what_is_all_noise_comes_last_if_it_passes() -> None:
    noise = {"a": 1.0, "b": 1e-3, "c": 1e-3}
    assert compare("update", 1, {"a": 1.5, "b": 1e-4, "c": 0.0}, noise, LEAST).parameter == "b"
    for excess in (9.0, math.inf):
        row = compare("update", 1, {"a": excess, "b": 1e-4, "c": 0.0}, noise, LEAST)
        assert (row.parameter, row.ok) == ("a", False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_fails(value: float) -> None:
    differences = relative({"a": 0.0, "b": value}, {"a": 1.0, "b": 1.0})
    row = compare("gradients", 2, differences, {"a": 1.0, "b": 1.0}, LEAST)
    assert (row.parameter, row.ok) == ("b", False)
    assert not compare_losses(1, 2.0, value, 0.1, 1e-6).ok


def test_losses() -> None:
    assert compare_losses(1, 2.0, 2.0 + 1e-6, 0.0, 1e-6).ok
    assert not compare_losses(1, 2.0, 2.1, 0.0, 1e-6).ok
    assert compare_losses(1, 2.0, 2.1, 0.01, 1e-6).ok


def test_noise_is_the_most_of_all_steps() -> None:
    assert larger(larger({}, {"a": 1.0, "b": 2.0}), {"a": 3.0, "b": 1.0}) == {"a": 3.0, "b": 2.0}


def test_a_few_elements_may_move_the_other_way() -> None:
    moved = math.sqrt(4 * 2.0**2) / math.sqrt(400 * 1.0**2)  # four of 400, each by ±1, to the other side
    assert least_update(400) == pytest.approx(moved)
