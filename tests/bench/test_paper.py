"""The paper's tables, as far as they are said to be reproduced."""

from __future__ import annotations

import re

import pytest

from scripts import paper


def test_what_is_said_to_be_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    """The order of the ablation, the median error of its speed-ups, and utilization with gradients amortised."""
    paper.main()
    said = capsys.readouterr().out
    assert re.findall(r"order (as|not as) in the paper", said).count("as") == 12, "profiled and extrapolated rows"
    assert all(int(median) <= 15 for median in re.findall(r"median error (\d+)%", said))
    amortised = said[said.index("== gradients reduced every 64") :]
    cells = re.findall(r"(\d+) \( *(\d+)\)", amortised)
    assert len(cells) == 2 * 2 * 7
    assert all(abs(int(ours) - int(theirs)) <= 15 for ours, theirs in cells)
    scaling = [
        re.findall(r"(\d+)%", line) for line in said[said.index("percent of linear") :].splitlines() if "%" in line
    ]
    assert len(scaling) == 2 * 4 * 2
    assert all(parts == sorted(parts, key=int, reverse=True) for parts in scaling), "more GPUs, more to reduce"
    v100 = [line.split() for line in said[said.index("8 V100s") :].splitlines()[1:]]
    assert len(v100) == 7
    assert all(abs(float(ours) - float(theirs.rstrip(";"))) < 8 for *_, ours, _, _, _, _, theirs, _ in v100), "waiting"
    longer = re.findall(r"\+(\d+\.\d)%$", said, re.MULTILINE)
    assert len(longer) == 4
    assert all(float(percent) < 20 for percent in longer)
