"""Bad input: a clear error, before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.act.local import run_local

pytestmark = pytest.mark.beside


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda net: (net, sgd(net), "fast"), "observe, suggest, auto; got 'fast'"),
        (lambda net: (nn.ReLU(), sgd(net)), "no parameters"),
        (lambda net: (net.requires_grad_(False), sgd(net)), "no parameters that require a gradient"),
        (lambda net: (net, sgd(nn.Linear(3, 1))), "2 of the optimizer's parameters are not in the model"),
        (lambda net: ("model", sgd(net)), "got str"),
        (lambda net: (net, "sgd"), "wanted a torch optimizer"),
    ],
)
def test_without_a_process_group(arguments: Any, words: str) -> None:
    with pytest.raises(paceline.ConfigError, match=words):
        paceline.attach(*arguments(nn.Linear(2, 1)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr_rule": "cubic"}, "cubic"),
        ({"max_staleness": -1}, "-1"),
        ({"peer_timeout_s": 0.0}, "> 0"),
        ({"scaler": 3}, "int"),
    ],
)
def test_options(options: dict[str, Any], words: str) -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(paceline.ConfigError, match=words):
        paceline.attach(net, sgd(net), **options)


def test_data() -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(paceline.ConfigError, match="batch_size must be >= 1, got 0"):
        paceline.attach(net, sgd(net)).data(TensorDataset(torch.ones(3)), batch_size=0)


def refusals(rank: int, run_dir: Path) -> dict[str, str]:
    """Every refusal that needs a DDP: its message by name."""
    said = {}

    def refused(name: str, module: nn.Module, **options: Any) -> None:
        try:
            paceline.attach(module, sgd(module), run_dir=run_dir / name, **options).close()
            said[name] = "accepted"
        except paceline.ConfigError as error:
            said[name] = str(error)

    refused("bare_module", nn.Linear(2, 1))
    hooked = DistributedDataParallel(nn.Linear(2, 1))
    hooked.register_comm_hook(None, allreduce_hook)
    refused("foreign_hook", hooked)
    twice = DistributedDataParallel(nn.Linear(2, 1))
    paceline.attach(twice, sgd(twice), run_dir=run_dir / "once").close()
    refused("second_hook", twice)
    static = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    with static.no_sync():
        refused("static_graph_in_no_sync", static)
    refused("modes_differ", DistributedDataParallel(nn.Linear(2, 1)), mode="auto" if rank else "observe")
    late = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    pace = paceline.attach(late, sgd(late), run_dir=run_dir / "late")
    try:
        with late.no_sync():
            late(torch.ones(1, 2))
        said["static_graph_no_sync_later"] = "accepted"
    except paceline.ConfigError as error:
        said["static_graph_no_sync_later"] = str(error)
    loader_error = ""
    try:
        pace.data(TensorDataset(torch.ones(1)), batch_size=1)
    except paceline.ConfigError as error:
        loader_error = str(error)
    said["too_few_samples"] = loader_error
    pace.close()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        reducer = DistributedDataParallel(nn.Linear(2, 1))
    refused("python_reducer", reducer)
    return said


def test_with_a_process_group(tmp_path: Path) -> None:
    outcomes = run_local(refusals, 2, tmp_path)
    assert [o.error for o in outcomes] == [None, None]
    for outcome in outcomes:
        said = outcome.value
        assert "wrap the model" in said["bare_module"]
        assert "drop that hook" in said["foreign_hook"]
        assert "allreduce_hook" in said["foreign_hook"]
        assert "already attached" in said["second_hook"]
        assert "drop static_graph=True" in said["static_graph_in_no_sync"]
        assert "drop static_graph=True" in said["static_graph_no_sync_later"]
        assert "same mode" in said["modes_differ"]
        assert "1 samples for 2 ranks" in said["too_few_samples"]
        assert "python_reducer" in said["python_reducer"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["demo", "--slow-rank", "4"], "--slow-rank must be one of the 4 ranks 0..3, got 4"),
        (["demo", "--cause", "magic"], "--cause must be one of"),
        (["demo", "--slowdown", "0.5"], "--slowdown must be above 1"),
        (["demo", "--ranks", "1"], "--ranks must be 2..16"),
        (["demo", "--seeds", "0"], "--seeds must be >= 1"),
    ],
)
def test_command_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from paceline import cli

    monkeypatch.setattr(sys, "argv", ["paceline", *flags])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_report_of_no_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "report", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no run log at" in done.stderr.replace("\n", " ")
