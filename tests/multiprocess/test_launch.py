"""Starting from the command line: `paceline run`, torchrun's own restarts, and a job ended by its launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.beside

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"

RESTARTED = """
import os, signal, torch, torch.distributed as dist, paceline
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
with paceline.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), run_dir={run_dir!r}):
    for step in range(12):
        ddp(torch.ones(1, 2)).sum().backward()
        if step == 6 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
print("finished", dist.get_rank())
dist.destroy_process_group()
"""


def paceline_run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline.cli", "run", "--nproc-per-node", "2", *arguments],
        capture_output=True,
        text=True,
        timeout=80,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_example_runs_and_reports(tmp_path: Path) -> None:
    done = paceline_run(str(EXAMPLE), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "paceline_runs").iterdir()
    assert {"run.jsonl", "summary.json", "report.html"} <= {path.name for path in run_dir.iterdir()}
    assert "2 ranks on host" in done.stderr, "rank 0 says in words what it saw"


def test_a_killed_worker_is_reported_and_torchrun_restarts_it(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(RESTARTED.format(run_dir=str(tmp_path / "run")))
    done = paceline_run("--max-restarts", "1", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()]
    assert kinds.count("run") == 2
    assert kinds.index("failure") < len(kinds) - 1, "the killed worker is in the log, and the restarted run after it"
