"""The command line: turns flags into the library's own calls. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.errors import ConfigError, PacelineError

app = typer.Typer(
    help="Straggler-tolerant distributed training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


@app.command(context_settings={**_PASS_ON, "help_option_names": []})
def run(context: typer.Context) -> None:
    """torchrun with Paceline's defaults: `paceline run [torchrun flags] script.py [script flags]`."""
    if not context.args or context.args[0] in ("-h", "--help"):
        console.print("paceline run [torchrun flags] script.py [script flags]: torchrun with Paceline's defaults.")
        console.print("All flags are torchrun's; see [bold]torchrun --help[/bold].", highlight=False)
        raise typer.Exit(0 if context.args else 2)
    from torch.distributed import run as torchrun

    # Without it a worker that restarts on Gloo cannot rejoin: the old store still holds its address.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    torchrun.main(context.args)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 4,
    slow_rank: Annotated[int, typer.Option(help="Which of them is slow.")] = 2,
    slowdown: Annotated[float, typer.Option(help="How many times slower it is.")] = 5.0,
    cause: Annotated[str, typer.Option(help="What makes it slow: compute, data, gc or outside.")] = "compute",
    seeds: Annotated[int, typer.Option(help="Repetitions with other initial parameters.")] = 1,
    out: Annotated[Path, typer.Option(help="Directory for logs and reports.")] = Path("demo_run"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a small CNN with a planted slow rank: without it, under plain DDP, and under Paceline."""
    from paceline.demo.run import DemoOptions, run_demo

    options = DemoOptions(ranks, slow_rank, slowdown, cause, seeds, out)
    quiet = Console(stderr=True) if as_json else console
    quiet.print(
        f"Training a CNN on scikit-learn's digits: {ranks} processes, rank {slow_rank} made {slowdown:g}x slower "
        f"({cause}).\nEach step is paced to about 50 ms, so that {ranks} ranks fit a few cores: the pacing stands in "
        "for accelerator time.\nEverything else is real: processes, sockets, gradients, accuracy.",
        highlight=False,
    )
    with Progress(
        TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=quiet
    ) as bars:
        tasks: dict[str, Any] = {}

        def on_progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        summary = run_demo(options, on_progress)
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        _print_demo(summary, options.out)


def _print_demo(summary: dict[str, Any], out: Path) -> None:
    from paceline.report.summary import text

    verdict = text(json.loads((out / "auto" / "summary.json").read_text(encoding="utf-8")))
    console.print()
    console.print(verdict, highlight=False, markup=False)
    table = Table(
        title=f"Time to {summary['target_accuracy']:.0%} test accuracy, mean of {summary['num_seeds']} seed(s)"
    )
    for column in ("run", "time", "vs plain DDP", "final accuracy", "trained", "dropped"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=column == "run")
    names = {"clean": "nobody slow, plain DDP", "ddp": "slow rank, plain DDP", "auto": "slow rank, Paceline auto"}
    plain = _mean(summary["tta_s"]["ddp"])
    for system, name in names.items():
        mean = _mean(summary["tta_s"][system])
        samples = summary["samples"][system]
        table.add_row(
            name,
            "not reached" if mean is None else f"{mean:.1f} s",
            "-" if mean is None or plain is None else f"{mean / plain:.2f}x",
            f"{summary['accuracy'][system]:.1%}",
            f"{samples['trained']:,}",
            f"{samples['dropped']:,}",
        )
    console.print(table)
    console.print(f"Report: {out / 'report.html'}   Numbers: {out / 'summary.json'}", highlight=False)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run directory: it holds run.jsonl.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Rebuild summary.json and report.html of a run from its log, and print the verdict."""
    from paceline.report.summary import text, write_reports

    summary = write_reports(run_dir)
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        console.print(text(summary), highlight=False, markup=False)
        console.print(f"Report: {run_dir / 'report.html'}", highlight=False)


def main() -> None:
    """Entry point of the `paceline` command."""
    try:
        app()
    except ConfigError as error:
        Console(stderr=True).print(f"paceline: {error}", highlight=False, markup=False)
        sys.exit(2)
    except PacelineError as error:
        Console(stderr=True).print(f"paceline: {error}", highlight=False, markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
