"""How fast a lost rank is named: from the fault to the error on the last of the others, seconds. Prints JSON.

python bench/failures.py
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from paceline.act.local import run_local
from paceline.demo.task import TaskConfig, train
from paceline.errors import PeerError
from paceline.record import read
from paceline.types import Fault, FaultKind, FaultPlan

SLOW, LIMIT_S = 2, 10.0
PLACES = {
    "in the full ring": (1, False),
    "rank 0 (hosts the store)": (0, False),
    "in the ring": (3, True),
    "attached": (SLOW, True),
}


def run(rank: int, config: TaskConfig) -> dict[str, Any]:
    """Train until the error; tell when the fault struck here, or when the error came and whom it named."""
    try:
        train(rank, config)
    except PeerError as error:
        return {"named": error.rank, "at": time.time(), "text": str(error)}
    return {"named": None, "at": time.time(), "text": "went on to the end"}


def main(
    kinds: Annotated[str, typer.Option(help="Which failures, comma-separated.")] = "kill,stop,raise",
) -> None:
    """Run every kind at every place and print."""
    rows = []
    jobs = [(FaultKind(kind), place) for kind in kinds.split(",") for place in PLACES]
    for kind, place in track(jobs, description="failures"):
        victim, slow = PLACES[place]
        step = 20 if victim == SLOW else 45
        faults = [Fault(victim, kind, from_step=step, until_step=step + 1)]
        if slow:
            faults.append(Fault(SLOW, FaultKind.COMPUTE, 0.2))
        with tempfile.TemporaryDirectory() as directory:
            config = TaskConfig("auto", Path(directory) / "run", FaultPlan(tuple(faults)), num_epochs=14)
            outcomes = run_local(run, 4, config, timeout_s=60.0)
            lines = read(Path(directory) / "run")
            started = lines[0].data["started_at_s"]
            report = (Path(directory) / "run" / "report.html").is_file()
        last_step = [line.value for line in lines if line.kind == "step" and line.value.rank == victim][-1]
        struck = started + last_step.started_s + last_step.wall_s
        others = [o.value for o in outcomes if o.rank != victim]
        rows.append(
            {
                "kind": kind.value,
                "where": place,
                "victim": victim,
                "named_by": sum(o is not None and o["named"] == victim for o in others),
                "went_on": sum(o is not None and o["named"] is None for o in others),
                "seconds_to_last": round(max(o["at"] for o in others if o) - struck, 2),
                "report_written": report,
                "says": next((o["text"] for o in others if o), None),
            }
        )
    late = [row for row in rows if not row["went_on"] and row["seconds_to_last"] > LIMIT_S]
    print(json.dumps({"limit_s": LIMIT_S, "over_the_limit": len(late), "rows": rows}, indent=2))


if __name__ == "__main__":
    typer.run(main)
