"""Promise two: the right rank and the right cause, whatever is planted; no alarm when nothing is.

`bench/guilty.py` runs every cause on every rank and ten clean runs of 200 steps; here each cause and each rank once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.demo.suspects import PLANTED, verdicts


@pytest.mark.parametrize(
    ("cause", "rank"), [("compute", 1), ("data", 2), ("gc", 3), ("outside", 0), ("buffers", 0), ("buffers", 2)]
)
def test_names_the_planted_rank_and_cause(cause: str, rank: int, tmp_path: Path) -> None:
    found = verdicts(cause, rank, tmp_path)
    assert [(v.rank, v.cause) for v in found] == [(rank, PLANTED[cause])]
    assert found[0].step <= 20


def test_a_clean_run_raises_no_alarm(tmp_path: Path) -> None:
    assert verdicts(None, 0, tmp_path, num_steps=100) == []
