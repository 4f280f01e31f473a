from __future__ import annotations

from pathlib import Path

import pytest

from oases_hf.costs import CostTable, Curve, Slowdown
from oases_hf.errors import ConfigError

from .examples import by_hand, random_table


@pytest.mark.parametrize("seed", range(5))
def test_json_gives_back_the_same_table(seed: int, tmp_path: Path) -> None:
    table = random_table(seed, tmp_size=4, kinds=2)
    assert CostTable.from_json(table.to_json()) == table
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tmp_size": 2}'])
def test_what_is_no_table_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cost table .*other.json: this is no cost table"):
        CostTable.load(tmp_path / "other.json")


def test_a_curve_between_and_beyond_its_points() -> None:
    curve = Curve(((10, 1.0), (100, 2.0), (200, 4.0)))
    assert [curve(size) for size in (1, 10, 55, 100, 150, 200, 300)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [Curve(((10, 1.0),))(size) for size in (5, 10, 20)] == [1.0, 1.0, 2.0]
    assert Curve(((10, 2.0), (20, 1.0)))(100) == 1.0


@pytest.mark.parametrize("points", [(), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((0, 1.0),)])
def test_a_curve_needs_growing_sizes(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError, match="sizes that grow"):
        Curve(points)


def test_nothing_is_faster_beside_something_else() -> None:
    with pytest.raises(ConfigError, match="nothing runs faster"):
        Slowdown(compute=0.9)


def test_what_was_not_measured_is_named() -> None:
    table = by_hand(4)
    (kind,) = table.kinds
    assert table.degrees() == (1, 2, 4)
    assert table.all_reduce_ms(1, 100) == table.all_gather_ms(1, 100) == 0.0
    with pytest.raises(ConfigError, match=r"block: degree 8 was not measured, only \[1, 2, 4\]"):
        table.timing(kind, 8, 2)
    with pytest.raises(ConfigError, match=r"block at degree 2: sub_batches 3 was not measured, only \[1, 2, 4\]"):
        table.timing(kind, 2, 3)
    with pytest.raises(ConfigError, match="parameters of block: degree 8"):
        table.parameters(kind, 8)
    with pytest.raises(ConfigError, match="all_reduce: group of 3"):
        table.all_reduce_ms(3, 100)
    with pytest.raises(ConfigError, match="all_gather: group of 8"):
        table.all_gather_ms(8, 100)


def test_uneven_rows_count_for_the_most_loaded_rank() -> None:
    table = by_hand(4, rows=7, sequence=10, hidden=3)
    assert [table.sub_batch_rows(degree, 1) for degree in (4, 2, 1)] == [7, 8, 8]
    assert [table.sub_batch_rows(degree, 4) for degree in (4, 2, 1)] == [2, 2, 4]
    assert [table.hidden_elements(degree, 4) for degree in (4, 2, 1)] == [4 * 30, 2 * 30, 30]


def test_rows_filled_up_take_time_and_memory() -> None:
    table = by_hand(4, rows=7)
    (kind,) = table.kinds
    measured = kind.timings[4][4]
    assert table.timing(kind, 4, 4, rows=2) == measured  # as measured: two rows, nothing is filled up at degree 4
    filled = table.timing(kind, 4, 4, rows=4)
    assert (filled.forward_ms, filled.backward_ms) == (2 * measured.forward_ms, 2 * measured.backward_ms)
    assert filled.runtime_bytes == 2 * measured.runtime_bytes
    assert filled.shared_bytes == measured.shared_bytes
    assert filled.graph_bytes == 2 * measured.graph_bytes - measured.shared_bytes, "the rows share it"
