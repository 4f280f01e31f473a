"""The paper's tables, as far as they are said to be reproduced."""

from __future__ import annotations

import re

import pytest

from scripts import paper


def test_the_order_of_the_ablation_and_the_median_error(capsys: pytest.CaptureFixture[str]) -> None:
    """In the profiled rows, with gradients reduced at every step."""
    paper.main()
    said = capsys.readouterr().out
    first = said[: said.index("== gradients reduced every 64")]
    for cluster in re.split(r"3090: speed-up", first)[1:]:
        for name in ("BERT-1.3B", "LLaMA-7B"):
            row = cluster[cluster.index(f"  {name} ") :]
            assert "profiled" in row.splitlines()[0]
            assert "order as in the paper" in row.splitlines()[2]
    assert all(int(median) <= 15 for median in re.findall(r"median error (\d+)%", said))
    longer = re.findall(r"\+(\d+\.\d)%$", said, re.MULTILINE)
    assert len(longer) == 4
    assert all(float(percent) < 20 for percent in longer)
