"""Rows: the way to JSON and back, the table, and the chart."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.rows import Row, plot, print_table, read_json, write_json

ROWS = (
    Row("megatron", "one batch", 12.34, 1.0, 5_000_000, 7, 4_000_000, 9_000_000, (12.34, 12.5), setting="here"),
    Row("auto", "planned", 6.0, None, recompute="some", setting="here"),
    Row("hf", "theirs", failure="out of memory", setting="there"),
)


def test_json_keeps_all(tmp_path: Path) -> None:
    write_json(ROWS, tmp_path / "rows.json")
    assert read_json(tmp_path / "rows.json") == list(ROWS)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(ROWS)
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:8] for line in lines] == [
        ["megatron", "full", "12.3", "1.00", "5.0", "7", "9.0", "one"],
        ["auto", "some", "6.0", "–", "–", "–", "–", "planned"],
        ["hf", "full", "out", "of", "memory"],
    ]


def test_chart_has_a_bar_for_every_row(tmp_path: Path) -> None:
    plot(ROWS, tmp_path / "rows.svg")
    drawn = (tmp_path / "rows.svg").read_text()
    for words in ("megatron", "auto, recompute some", "hf", " 12", "out of memory", "here", "there"):
        assert f"<!-- {words}" in drawn
