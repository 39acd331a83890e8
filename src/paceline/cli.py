"""The command line: turns flags into the library's own calls. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
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
    arch: Annotated[str, typer.Option(help="ring (all-reduce under DDP) or ps (parameter servers).")] = "ring",
    ranks: Annotated[int | None, typer.Option(help="Processes that train; 4, or 6 with servers.")] = None,
    servers: Annotated[int, typer.Option(help="Processes that serve, with --arch ps.")] = 2,
    slow_rank: Annotated[int, typer.Option(help="Which of them is slow.")] = 2,
    slowdown: Annotated[float, typer.Option(help="How many times slower it is.")] = 5.0,
    cause: Annotated[str, typer.Option(help="What makes it slow: compute, data, gc or outside.")] = "compute",
    seeds: Annotated[int, typer.Option(help="Repetitions with other initial parameters.")] = 1,
    out: Annotated[Path, typer.Option(help="Directory for logs and reports.")] = Path("demo_run"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a small CNN with a planted slow rank: without it, plainly, and under Paceline."""
    from paceline.demo.run import DemoOptions, run_demo

    ranks = ranks or (6 if arch == "ps" else 4)
    options = DemoOptions(ranks, slow_rank, slowdown, cause, seeds, out, arch, servers)  # type: ignore[arg-type]
    quiet = Console(stderr=True) if as_json else console
    beside = f" and {servers} parameter servers" if arch == "ps" else ""
    quiet.print(
        f"Training a CNN on scikit-learn's digits: {ranks} processes{beside}, rank {slow_rank} made {slowdown:g}x "
        f"slower ({cause}).\nEach step is paced to about 50 ms, so that all fit a few cores: the pacing stands in "
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
    plain_name = "plain DDP" if summary["arch"] == "ring" else "BSP"
    for column in ("run", "time", f"vs {plain_name}", "final accuracy", "trained", "dropped"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=column == "run")
    names = {"clean": f"nobody slow, {plain_name}", "auto": "slow rank, Paceline auto"}
    names |= dict.fromkeys(("ddp", "bsp"), f"slow rank, {plain_name}")
    plain = _mean(summary["tta_s"]["ddp" if summary["arch"] == "ring" else "bsp"])
    for system in summary["tta_s"]:
        name = names.get(system, f"slow rank, {system}")
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
    if summary.get("tta_ratio_vs_best_fixed"):
        console.print(
            f"The best mode that could have been chosen by hand is {summary['best_fixed']}: auto takes "
            f"{summary['tta_ratio_vs_best_fixed']:.2f} times as long, finding out included.",
            highlight=False,
        )
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


@app.command()
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A family of stragglers, such as constant:rank=2,slow_factor=4, a CSV or Parquet file of step times, "
            "or a run directory."
        ),
    ],
    ranks: Annotated[int | None, typer.Option(help="How many; 8, or as many as were measured, by default.")] = None,
    arch: Annotated[str, typer.Option(help="How gradients travel: ps (parameter server) or ring (all-reduce).")] = "ps",
    modes: Annotated[
        str, typer.Option(help="all, or names with commas: auto, published methods, policies such as ksync:6.")
    ] = "all",
    task: Annotated[str, typer.Option(help="What is trained: digits, mnist1d or chars.")] = "digits",
    seeds: Annotated[int, typer.Option(help="Repetitions with other models, orders and stragglers.")] = 3,
    out: Annotated[Path, typer.Option(help="Directory for table and page.")] = Path("simulation"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """What if: train a real model in virtual time, in every mode, with the stragglers of a trace."""
    from paceline.evaluate.simulation import Options, simulate_modes
    from paceline.evaluate.source import find_source
    from paceline.policy.catalog import split_names

    options = Options(find_source(trace, ranks), _arch(arch), split_names(modes), task, seeds, out)
    with _bar("simulating", as_json) as on_progress:
        table = simulate_modes(options, on_progress)
    if as_json:
        print(json.dumps(table, indent=2))
    else:
        _print_simulation(table, options.out)
    if table["errors"]:
        raise typer.Exit(1)


@app.command()
def evaluate(
    quick: Annotated[bool, typer.Option("--quick", help="Four kinds of stragglers, one task, two seeds.")] = False,
    arch: Annotated[str | None, typer.Option(help="ps or ring; both by default.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Repetitions; 5 by default.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Names with commas; all by default.")] = None,
    traces: Annotated[str | None, typer.Option(help="Kinds of stragglers, with commas; all by default.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Names and patterns with commas, such as auto,ssgd,fixed:*; all by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for rows, table and page; used again, it goes on.")] = Path(
        "evaluation"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Time to accuracy of every method under every kind of stragglers: the figures behind the claims."""
    from dataclasses import replace

    from paceline.evaluate import evaluation

    chosen: dict[str, Any] = {
        "archs": arch and (_arch(arch),),
        "num_seeds": seeds,
        "tasks": tasks and _names(tasks),
        "traces": traces and _names(traces),
        "methods": methods and _names(methods),
    }
    base = evaluation.Options.quick() if quick else evaluation.Options()
    options = replace(base, out=out, **{name: value for name, value in chosen.items() if value is not None})
    with _bar("evaluating", as_json) as on_progress:
        table = evaluation.evaluate(options, on_progress)
    if as_json:
        print(json.dumps(table, indent=2))
    else:
        _print_evaluation(table, options.out)
    if table["errors"]:
        raise typer.Exit(1)


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(help="A run directory: it holds run.jsonl.")],
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Also train the same in virtual time (demo runs): as fast as live?")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Feed a recorded run through the same controller: does it decide the same? Exit code 1 if not."""
    from paceline.evaluate.replay import replay as replay_lines
    from paceline.record import read

    lines = read(run_dir)
    result = replay_lines(lines)
    comparisons: tuple[Any, ...] = ()
    if simulated:
        from paceline.evaluate.live import simulate_run

        comparisons = simulate_run(lines)
    if as_json:
        extra = {"simulated": [c.to_json() for c in comparisons]} if simulated else {}
        print(json.dumps({**result.to_json(), **extra}, indent=2))
    else:
        _print_replay(result)
        _print_comparisons(comparisons)
    if not (result.is_equal and all(c.is_close for c in comparisons)):
        raise typer.Exit(1)


@app.command()
def schedule(
    ranks: Annotated[int, typer.Option(help="How many.")],
    late: Annotated[str | None, typer.Option(help="Late ranks, with commas; the last by default.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Into how many the buffer is cut; ranks - 1 by default.")] = None,
    algorithm: Annotated[str, typer.Option(help="late, ring, halving, tree or direct.")] = "late",
    nbytes: Annotated[int, typer.Option(help="Size of the buffer, bytes.")] = 2**30,
    alpha_s: Annotated[float, typer.Option(help="Cost per message, seconds.")] = 3e-6,
    beta_s_per_byte: Annotated[float, typer.Option(help="Cost per byte, seconds; 450 GiB/s by default.")] = 1
    / (450 * 2**30),
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    draw: Annotated[Path | None, typer.Option(help="Picture of all rounds: a .svg, .png or .pdf file.")] = None,
) -> None:
    """Build an all-reduce, around late ranks or classic; verify it, cost it, show who sends what to whom."""
    from paceline.collective.explain import build, facts

    built = build(algorithm, ranks, _ranks(late or ""), chunks)
    told = facts(built, nbytes, alpha_s, beta_s_per_byte)
    if draw is not None:
        if draw.suffix not in (".svg", ".png", ".pdf"):
            raise ConfigError(f"--draw wants a .svg, .png or .pdf file, got {draw}")
        if not draw.absolute().parent.is_dir():
            raise ConfigError(f"--draw wants a file in a folder that is there, got {draw}")
        from paceline.report.rounds import draw_rounds

        draw_rounds(told, draw)
    if as_json:
        print(json.dumps(told))
    else:
        from paceline.report.schedule import table, text

        console.print(table(told))
        console.print(text(told), highlight=False, markup=False)
        if draw is not None:
            console.print(f"Picture: {draw}", highlight=False, markup=False)
    if not told["verified"]:
        raise typer.Exit(1)


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(rank) for rank in _names(text))
    except ValueError:
        raise ConfigError(f"--late wants ranks with commas, such as 3 or 2,5; got {text!r}") from None


def _arch(name: str) -> Any:
    if name not in ("ps", "ring"):
        raise ConfigError(f"--arch must be ps or ring, got {name!r}")
    return name


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@contextmanager
def _bar(what: str, on_stderr: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, as a function of what is done and how much there is."""
    quiet = Console(stderr=True) if on_stderr else console
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=quiet) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _print_simulation(table: dict[str, Any], out: Path) -> None:
    target = f"time to {table['target_accuracy']:.0%}"
    title = f"{table['trace']}: {table['num_ranks']} ranks, {table['arch_words']}, {table['task']}, virtual seconds"
    shown = _table(title, "mode", target, "95 % interval", "seeds there", "over the best", "final accuracy", "dropped")
    for row in table["rows"]:
        arrives, several = row["num_reached"] > 0, row["num_seeds"] > 1
        shown.add_row(
            row["mode"],
            f"{row['tta_s']:.1f}" if arrives else "never",
            f"{row['tta_s_low']:.1f} to {row['tta_s_high']:.1f}" if arrives and several else "-",
            f"{row['num_reached']}/{row['num_seeds']}",
            f"{row['over_best']:.2f}x" if arrives else "-",
            f"{row['accuracy']:.1%}",
            f"{row['dropped_ratio']:.1%}",
        )
    console.print(shown)
    console.print(f"{table['headline']}. {table['lead']}", highlight=False, markup=False)
    _print_errors(table["errors"])
    console.print(f"Page: {out / 'simulation.html'}   Numbers: {out / 'simulation.json'}", highlight=False)


def _print_evaluation(table: dict[str, Any], out: Path) -> None:
    from paceline.evaluate.claims import ARCH_WORDS, claims

    for arch in table["setup"]["archs"]:
        shown = _table(
            f"{ARCH_WORDS[arch]}: virtual seconds to accuracy, mean of {table['setup']['num_seeds']} seeds",
            "stragglers", "task", "auto", "ssgd", "best paper", "its time", "limit", "vs ssgd", "vs paper", "regret",
        )  # fmt: skip
        for row in (row for row in table["comparisons"] if row["arch"] == arch):
            shown.add_row(
                row["trace"],
                row["task"],
                *(_number(row[key]) for key in ("auto_s", "ssgd_s")),
                row["best_published"] or "-",
                *(_number(row[key]) for key in ("best_published_s", "limit_s")),
                *(_number(row[key], "x") for key in ("vs_ssgd", "vs_best_published", "regret")),
            )
        if shown.row_count:
            console.print(shown)
    shown = Table(title="Claims")
    for name in ("where", "what", "wanted", "measured", "holds"):
        shown.add_column(name, justify="right" if name in ("wanted", "measured") else "left")
    for claim in claims(table["summary"]):
        holds = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "not run"}[claim.holds]
        shown.add_row(ARCH_WORDS[claim.scope], claim.what, claim.wanted, claim.got, holds)
    console.print(shown)
    _print_errors(table["errors"])
    console.print(f"Page: {out / 'evaluation.html'}   Numbers: {out / 'evaluation.json'}", highlight=False)


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}" if unit else f"{value:.1f}"


def _print_errors(errors: list[dict[str, Any]]) -> None:
    for error in errors[:5]:
        who = ", ".join(str(value) for name, value in error.items() if name != "error")
        console.print(f"failed ({who}): {error['error']}", style="red", highlight=False, markup=False)
    if len(errors) > 5:
        console.print(f"and {len(errors) - 5} more", style="red")


def _print_replay(result: Any) -> None:
    shown = Table(title="Plans, live and replayed")
    for name in ("plan", "step", "live", "replayed", "same"):
        shown.add_column(name, justify="right" if name in ("plan", "step") else "left")
    for pair in result.plans:
        either = pair.live or pair.replayed
        same = "[green]yes[/green]" if pair.is_equal else "[red]no[/red]"
        shown.add_row(str(either.epoch), str(either.effective_step), _policy(pair.live), _policy(pair.replayed), same)
    if result.plans:
        console.print(shown)
    console.print(result.text(), highlight=False, markup=False)


def _print_comparisons(comparisons: tuple[Any, ...]) -> None:
    if not comparisons:
        return
    shown = _table("Time to accuracy, live and simulated", "training", "live", "simulated", "ratio", "close")
    for c in comparisons:
        times = ("not reached" if time_s is None else f"{time_s:.2f} s" for time_s in (c.live_s, c.simulated_s))
        shown.add_row(c.name, *times, _number(c.ratio, "x"), _yes_or_no(c.is_as_fast))
    console.print(shown)
    paced = _table(
        "Time between updates, live and simulated", "training", "mode", "live", "simulated", "ratio", "within"
    )
    for c in comparisons:
        for pace in c.paces:
            times = (f"{time_s * 1e3:.1f} ms" for time_s in (pace.live_s, pace.simulated_s))
            paced.add_row(c.name, pace.mode, *times, _number(pace.ratio, "x"), _yes_or_no(pace.is_close))
    if paced.row_count:
        console.print(paced)


def _yes_or_no(is_so: bool) -> str:
    return "[green]yes[/green]" if is_so else "[red]no[/red]"


def _policy(plan: Any) -> str:
    return "-" if plan is None else str(plan.policy)


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
