"""Who is guilty: every planted cause on every rank, and clean runs that must raise no alarm. Prints JSON.

python bench/guilty.py --clean-runs 10 --clean-steps 200
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from paceline.demo.suspects import PLANTED, verdicts

NUM_RANKS = 4


def main(
    clean_runs: Annotated[int, typer.Option(help="Runs with nothing planted.")] = 10,
    clean_steps: Annotated[int, typer.Option(help="Steps of each.")] = 200,
    extra_ms: Annotated[float, typer.Option(help="Planted extra time per step, ms.")] = 100.0,
) -> None:
    """Run the table and print it."""
    jobs: list[tuple[str | None, int]] = [(cause, rank) for cause in PLANTED for rank in range(NUM_RANKS)]
    jobs += [(None, 0)] * clean_runs
    rows: list[dict[str, Any]] = []
    alarms = 0
    for cause, rank in track(jobs, description="runs"):
        with tempfile.TemporaryDirectory() as directory:
            steps = 30 if cause else clean_steps
            found = verdicts(cause, rank, Path(directory), steps, extra_ms / 1e3, NUM_RANKS)
        if cause is None:
            alarms += len(found)
            continue
        said = [{"rank": v.rank, "phase": v.phase, "cause": v.cause, "step": v.step} for v in found]
        right = [(v.rank, v.cause) for v in found] == [(rank, PLANTED[cause])]
        rows.append({"planted": cause, "rank": rank, "said": said, "right": right})
    result = {
        "right": sum(row["right"] for row in rows),
        "of": len(rows),
        "clean_runs": clean_runs,
        "clean_steps": clean_steps,
        "false_alarms": alarms,
        "rows": rows,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    typer.run(main)
