"""The report: what a log means is what summary, text and page say."""

import json
import logging
import math
import re
import sys
from html.parser import HTMLParser

import pytest

from paceline.record import Line, RunLog, read
from paceline.report import charts, page, words
from paceline.report.history import Run
from paceline.report.summary import summarise, text, write_reports
from paceline.types import NoiseScale, StepTiming, Update, Verdict

RING = {"name": "AttachedRing", "ring": [0, 1, 3], "parent_of": {"2": 0}, "max_staleness": 16}
BSP = {"name": "BSP"}
HOSTS = ("node0", "node0", "node1", "node1")


class Memory(list):
    """A log in memory: what `read` would return of the same lines on disk, for runs that are long to write."""

    def write(self, kind, **data):
        self.append(Line(kind, data))

    def write_value(self, value, **extra):
        self.append(Line(type(value).__name__, extra, value))


def page_text(directory):
    """The text of a page without charts."""
    lines = read(directory)
    return Reader(page.render(lines, summarise(lines), with_charts=False)).text


def start(log, hosts=HOSTS, mode="auto"):
    log.write("run", schema=1, world_size=len(hosts), hosts=list(hosts), mode=mode, backend="gloo", torch="2.13.0",
              script="train.py", started_at_s=0.0, peer_timeout_s=6.0)  # fmt: skip


def end(log, time_s=9.0, samples=None, identical=True):
    log.write("end", time_s=time_s, samples=samples, noise_scale=None, identical_parameters=identical)


def timing(rank, step, started_s, own_s=0.05, wait_s=0.0, **fields):
    return StepTiming(rank, step, started_s, data_s=0.01, backward_s=own_s - 0.01, wait_s=wait_s, samples=8, **fields)


def lockstep(log, steps, slow=None, own_s=0.25, period_s=None):
    """Steps in which every rank waits for the slowest; returns the time after them."""
    longest = own_s if slow is not None else 0.05
    period_s = longest if period_s is None else period_s
    for step in steps:
        for rank in range(4):
            own = own_s if rank == slow else 0.05
            log.write_value(timing(rank, step, (step - 1) * period_s, own, longest - own), time_s=step * period_s)
    return steps[-1] * period_s


def plan(log, status, epoch=1, step=11, policy=RING, gain=4.0, time_s=2.5):
    log.write("plan", time_s=time_s, status=status, epoch=epoch, effective_step=step, policy=policy, lr_scale=0.8,
              predicted_gain=gain, reason=f"reason of plan {epoch}")  # fmt: skip


def gain(log, epoch=1, measured=3.5):
    log.write("gain", time_s=4.0, epoch=epoch, predicted=4.0, measured=measured, interval_before_s=0.25,
              interval_after_s=0.05, batch_before=32.0, batch_after=25.6)  # fmt: skip


def verdict(log, rank=2, lost=0.8, cause="compute", phase="backward", host="node1"):
    log.write_value(
        Verdict(8, rank, host, phase, cause, 5.0, 0.2, lost, 4, "own time 250 ms against 50 ms"), time_s=2.0
    )


def attached_run(directory, recovers=True):
    """Ten steps that wait for rank 2, forty without waiting for it, and, if it recovers, forty all together."""
    with RunLog(directory) as log:
        start(log)
        lockstep(log, range(1, 11), slow=2)
        verdict(log, rank=0, lost=0.1, cause="gc", phase="gc", host="node0")
        verdict(log)
        plan(log, "proposed", step=10)
        plan(log, "adopted", step=11)
        for step in range(11, 51):
            began = 2.5 + (step - 11) * 0.05
            for rank in (0, 1, 3):
                log.write_value(timing(rank, step, began), time_s=began)
            folded = step % 5 == 0
            if folded:
                log.write_value(timing(2, step - 4, began - 0.25, own_s=0.25), time_s=began)
            contributions = {0: 8, 1: 8, 3: 8} | ({2: 8} if folded and step < 50 else {})
            dropped = {2: 8} if step == 50 else {}
            log.write_value(Update(step, contributions, dropped, {2: 4} if folded else {}, 0.8), time_s=began)
        gain(log)
        if recovers:
            plan(log, "proposed", epoch=2, step=51, policy=BSP, gain=1.2, time_s=4.5)
            plan(log, "adopted", epoch=2, step=51, policy=BSP, gain=1.2, time_s=4.5)
            for step in range(51, 91):
                for rank in range(4):
                    log.write_value(timing(rank, step, 4.5 + (step - 51) * 0.05), time_s=4.5 + (step - 51) * 0.05)
            gain(log, epoch=2, measured=1.25)
    return directory


def finish(directory, **fields):
    with RunLog(directory) as log:
        end(log, **fields)
    return directory


class Reader(HTMLParser):
    """Collects what matters of a page: tags, text, ids and references to them; checks that tags are balanced."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.ids, self.references, self.open, self.words = [], [], set(), [], []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "br", "hr", "img", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "xlink:href", "src"):
                self.references.add(value)
            self.references |= {f"#{found}" for found in re.findall(r"url\(#([^)]*)\)", value or "")}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def test_a_clean_run_says_that_no_rank_is_slow(tmp_path):
    with RunLog(tmp_path) as log:
        start(log, mode="observe")
        lockstep(log, range(1, 31))
        log.write("metric", time_s=1.0, step=20, name="accuracy", value=0.5)
        log.write("metric", time_s=1.5, step=30, name="accuracy", value=0.75)
        end(log, time_s=1.6, samples={"trained": 960, "dropped": 0, "epochs": 1})
        log.write("metric", time_s=99.0, step=30, name="accuracy", value=0.9)  # as the demo does, after the end
    summary = write_reports(tmp_path)
    assert summary["culprit"] is None
    assert summary["verdicts"] == summary["decisions"] == []
    assert summary["partial"] is False
    assert (summary["steps"], summary["duration_s"], summary["world_size"]) == (30, 1.6, 4)
    assert summary["samples"] == {"trained": 960, "dropped": 0, "epochs": 1}
    assert summary["metrics"] == {"accuracy": 0.9}
    assert [entry["slowdown"] for entry in summary["per_rank"]] == [1.0] * 4
    assert [entry["lost_ratio"] for entry in summary["per_rank"]] == [0.0] * 4
    assert text(summary).splitlines()[0].startswith("no rank is slow: over 30 steps")
    html = Reader((tmp_path / "report.html").read_text())
    assert "No rank is slow" in html.text
    assert "Decisions" not in html.text
    assert html.tags.count("svg") == 3  # timeline, steps, metrics


def test_few_steps_prove_nothing(tmp_path):
    with RunLog(tmp_path) as log:
        start(log)
        lockstep(log, range(1, 5), slow=2)
    summary = summarise(read(tmp_path))
    assert "no rank is slow: but 4 steps are too few to tell" in text(summary)
    assert summary["per_rank"][2]["lost_ratio"] == 0.0


def test_the_culprit_is_the_verdict_that_costs_most(tmp_path):
    summary = summarise(read(attached_run(tmp_path)))
    assert summary["culprit"] == {
        "rank": 2, "host": "node1", "phase": "backward", "cause": "compute", "slowdown": 5.0, "excess_s": 0.2,
        "lost_ratio": 0.8, "evidence": "own time 250 ms against 50 ms", "since_step": 4,
    }  # fmt: skip
    assert [v["rank"] for v in summary["verdicts"]] == [0, 2]


def test_per_rank_numbers_come_from_the_steps(tmp_path):
    rank2 = summarise(read(attached_run(tmp_path, recovers=False)))["per_rank"][2]
    assert (rank2["steps"], rank2["steps_attached"], rank2["samples"]) == (18, 8, 144)
    assert (rank2["own_s_median"], rank2["wait_s_median"], rank2["slowdown"]) == (0.25, 0.0, 5.0)
    assert rank2["phases"]["backward"] == pytest.approx(0.24)
    # Seven of its steps in the ring count; forty without it took 2 s: what it does while attached costs nothing.
    assert rank2["lost_s"] == pytest.approx(7 * 0.2)
    assert rank2["lost_ratio"] == pytest.approx(7 * 0.2 / (7 * 0.25 + 40 * 0.05))


def test_what_a_rank_waits_for_is_no_slowness_of_its_own(tmp_path):
    others = summarise(read(attached_run(tmp_path)))["per_rank"]
    assert [others[rank]["lost_s"] for rank in (0, 1, 3)] == [0.0] * 3


def test_announced_time_costs_nothing(tmp_path):
    with RunLog(tmp_path) as log:
        start(log)
        for step in range(1, 21):
            for rank in range(4):
                expected = {"expected_s": 0.5} if rank == 1 else {}
                log.write_value(timing(rank, step, step * 0.7, own_s=0.1 if rank == 1 else 0.05, **expected))
    assert summarise(read(tmp_path))["per_rank"][1]["lost_s"] == 0.0


def test_decisions_are_plans_joined_with_their_gains(tmp_path):
    decisions = summarise(read(attached_run(tmp_path)))["decisions"]
    assert [(d["epoch"], d["status"], d["effective_step"]) for d in decisions] == [
        (1, "adopted", 11),
        (2, "adopted", 51),
    ]
    assert [(d["predicted_gain"], d["measured_gain"]) for d in decisions] == [(4.0, 3.5), (1.2, 1.25)]
    assert decisions[0]["policy"] == RING
    assert (decisions[0]["interval_before_s"], decisions[0]["interval_after_s"]) == (0.25, 0.05)


def test_a_rejected_plan_leaves_its_epoch_to_the_next(tmp_path):
    with RunLog(tmp_path) as log:
        start(log)
        lockstep(log, range(1, 41), slow=2)
        for status in ("proposed", "rejected", "proposed", "adopted"):
            plan(log, status, step=11 if status != "adopted" else 30)
        gain(log)
        plan(log, "proposed", epoch=2, policy=BSP)
    run = Run.of(read(tmp_path))
    assert [(d.epoch, d.data["status"], d.gain is not None) for d in run.decisions] == [
        (1, "rejected", False),
        (1, "adopted", True),
        (2, "proposed", False),
    ]
    assert [run.is_attached(2, step) for step in (11, 29, 30, 40)] == [False, False, True, True]


def test_text_and_page_tell_who_why_what_was_done_and_what_it_brought(tmp_path):
    finish(attached_run(tmp_path, recovers=False), samples={"trained": 1336, "dropped": 8, "epochs": 1})
    said = text(write_reports(tmp_path))
    assert said.startswith(
        "node1:2 is slow: +200 ms/step (5.0x), phase backward, cause compute; lost 80 % of the job\n"
    )
    assert "next: check clocks, temperature and co-located jobs on node1\n" in said
    assert (
        "done:   from step 11 on nobody waits for rank 2 (plan 1: rank 2 attached to rank 0; ring of 0, 1, 3)" in said
    )
    assert "gain:   3.5x faster to accuracy measured, 4.0x predicted" in said
    assert "samples: 1,336 trained, 8 dropped (0.6 %)" in said
    assert "staleness: mean 4.0, max 4 versions" in said
    assert re.search(r"^ +2  node1 +18 +250 ms +0.0 ms +5.0x +37 %  backward$", said, re.MULTILINE)
    html = Reader((tmp_path / "report.html").read_text())
    for sentence in (
        "Rank 2 on node1 is slow: longer computing in backward",
        "It needs 200 ms more per step than the other ranks (5.0x), mostly in the backward phase",
        "80 % of the job's time while everybody waited for it",
        "from step 11 on nobody waits for rank 2",
        "3.5x faster to accuracy measured, 4.0x predicted",
        "check clocks, temperature and co-located jobs on node1",
        "reason of plan 1",
        "own time 250 ms against 50 ms",
        "attached to rank 0",
        "rank 2 on node1 (slow)",
    ):
        assert sentence in html.text, sentence


def test_a_rank_that_has_recovered_was_slow(tmp_path):
    finish(attached_run(tmp_path))
    summary = summarise(read(tmp_path))
    said = text(summary)
    assert "node1:2 was slow for a while" in said
    assert "in steps 11 to 50 nobody waited for rank 2" in said
    assert "then all ranks were back in the ring" in said
    assert words.headline(summary).startswith("Rank 2 on node1 was slow for a while")
    assert "in its last steps it was on par (1.00x)" in page_text(tmp_path)


def test_a_failed_run_says_so_first(tmp_path):
    attached_run(tmp_path, recovers=False)
    with RunLog(tmp_path) as log:
        log.write("failure", time_s=5.0, rank=3, host="node1", reason="its process is gone (killed?)")
    summary = summarise(read(tmp_path))
    assert summary["partial"] is True
    assert summary["failure"] == {"rank": 3, "host": "node1", "reason": "its process is gone (killed?)", "time_s": 5.0}
    first = text(summary).splitlines()[0]
    assert first == "FAILED: rank 3 on host node1: its process is gone (killed?) (after 50 steps, 5.00 s)"
    # No end line: ten steps of four ranks with 8 samples, forty of three, and the attached rank's seven of eight.
    assert summary["samples"] == {"trained": 10 * 32 + 40 * 24 + 7 * 8, "dropped": 8, "epochs": None}
    shown = page_text(tmp_path)
    assert "The run failed: rank 3 on node1: its process is gone (killed?)" in shown
    assert "Partial" not in shown  # one alarm is enough


def test_a_failure_without_a_time_is_no_error(tmp_path):
    with RunLog(tmp_path) as log:
        start(log)
        lockstep(log, range(1, 11))
        log.write("failure", time_s=None, rank=0, host="node0", reason="killed")
    assert text(summarise(read(tmp_path))).startswith("FAILED: rank 0 on host node0: killed (after 10 steps, 500 ms)")


def test_a_log_that_ends_early_is_partial(tmp_path):
    with RunLog(tmp_path) as log:
        start(log)
        lockstep(log, range(1, 11))
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"kind": "step", "ra')
    summary = summarise(read(tmp_path))
    assert summary["partial"] is True
    assert text(summary).startswith("PARTIAL: ")
    assert "Partial: the log has no end" in page_text(tmp_path)


def test_a_log_with_nothing_but_its_header_makes_a_page(tmp_path):
    with RunLog(tmp_path) as log:
        start(log)
    summary = write_reports(tmp_path)
    assert (summary["steps"], summary["samples"], len(summary["per_rank"])) == (0, None, 4)
    assert "svg" not in Reader((tmp_path / "report.html").read_text()).tags


def test_different_parameters_at_the_end_are_an_alarm(tmp_path):
    with RunLog(tmp_path) as log:
        start(log)
        lockstep(log, range(1, 11))
        end(log, identical=False)
    summary = summarise(read(tmp_path))
    assert text(summary).startswith("WARNING: the ranks ended with different parameters")
    assert "do not trust this model" in page_text(tmp_path)


def test_samples_that_nobody_counts_are_unknown_not_zero(tmp_path):
    with RunLog(tmp_path) as log:
        start(log)
        end(log, samples={"trained": 0, "dropped": 0, "epochs": 0})
    summary = summarise(read(tmp_path))
    assert summary["samples"] is None
    assert "samples: not counted" in text(summary)


def test_thousands_of_steps_stay_a_small_page():
    log = Memory()
    start(log)
    time_s = lockstep(log, range(1, 5001), slow=2)
    verdict(log)
    for epoch in range(1, 41):
        plan(log, "adopted", epoch=epoch, step=120 * epoch, policy=RING if epoch % 2 else BSP, time_s=30.0 * epoch)
    for i in range(1, 2001):
        log.write("metric", time_s=i * time_s / 2000, step=2 * i, name="accuracy", value=i / 2000)
        log.write_value(NoiseScale(i, 60.0, 40.0, 90.0, i), time_s=i * time_s / 2000)
    html = page.render(log, summarise(log))
    assert len(html) < 400_000
    assert Reader(html).tags.count("svg") == 4


def test_many_ranks_show_the_slow_one_and_stay_small():
    log = Memory()
    start(log, hosts=[f"node{rank}" for rank in range(80)])
    for step in range(1, 21):
        for rank in range(80):
            log.write_value(timing(rank, step, step * 0.05, own_s=0.25 if rank == 77 else 0.05), time_s=step * 0.05)
    verdict(log, rank=77, host="node77")
    said = text(summarise(log))
    assert re.search(r"^ +77  node77 ", said, re.MULTILINE)
    assert "... and 64 faster ranks" in said
    html = page.render(log, summarise(log))
    assert len(html) < 700_000
    assert "rank 77 on node77 (slow)" in html
    assert "48 more ranks are not drawn" in Reader(html).text


@pytest.mark.parametrize(
    ("num_ranks", "num_steps", "one_by_one"), [(2, 390, True), (2, 410, False), (16, 130, False), (1, 1, True)]
)
def test_steps_are_drawn_one_by_one_while_they_can_be_seen(num_ranks, num_steps, one_by_one):
    log = Memory()
    start(log, hosts=["node0"] * num_ranks)
    for step in range(1, num_steps + 1):
        for rank in range(num_ranks):
            log.write_value(timing(rank, step, step * 0.05))
    bars = len(re.findall("[zZ]", " ".join(re.findall(r' d="([^"]*)"', charts.timeline(Run.of(log))))))
    assert (bars >= 2 * num_ranks * num_steps) is one_by_one


def test_long_curves_are_thinned():
    log = Memory()
    start(log)
    for step in range(1, 3001):
        for rank in range(4):
            log.write_value(timing(rank, step, step * 0.1, own_s=0.03 + 0.001 * (step * 7919 % 31), wait_s=0.01))
    assert len(charts.own_and_wait(Run.of(log))) < 50_000


def test_the_page_needs_nothing_from_outside_and_is_the_same_every_time(tmp_path):
    finish(attached_run(tmp_path))
    lines = read(tmp_path)
    html = page.render(lines, summarise(lines))
    assert html == page.render(lines, summarise(lines))
    reader = Reader(html)
    assert "http" not in html
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert len(reader.ids) == len(set(reader.ids)) > 0
    assert {reference.removeprefix("#") for reference in reader.references} <= set(reader.ids)


def test_everything_from_the_log_is_escaped(tmp_path):
    evil = "$x$<script>alert(1)</script>\"'&_{}"
    with RunLog(tmp_path) as log:
        log.write("run", schema=1, world_size=4, hosts=[evil] * 4, mode=evil, backend=evil, torch=evil, script=evil)
        lockstep(log, range(1, 31), slow=2)
        log.write_value(Verdict(8, 2, evil, "backward", evil, 5.0, 0.2, 0.8, 4, evil), time_s=1.0)
        log.write("plan", time_s=1.0, status="adopted", epoch=1, effective_step=9, policy=RING, lr_scale=1.0,
                  predicted_gain=2.0, reason=evil)  # fmt: skip
        log.write("metric", time_s=1.0, step=1, name=evil, value=1.0)
        log.write("event", time_s=1.0, message=evil)
        log.write("failure", time_s=1.0, rank=1, host=evil, reason=evil)
    write_reports(tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert "<script" not in html
    assert html.count("&lt;script&gt;") > 10
    reader = Reader(html)
    assert "script" not in reader.tags
    assert f"rank 1 on {evil}: {evil}" in reader.text
    assert "rank 1 on $x$<script>aler… (failed)" in reader.text  # in the chart: no formula either


def test_numbers_that_are_not_finite_become_strict_json(tmp_path):
    with RunLog(tmp_path) as log:
        start(log)
        lockstep(log, range(1, 21))
        log.write("metric", time_s=1.0, step=1, name="loss", value=math.nan)
        log.write_value(NoiseScale(1, 50.0, 0.0, math.inf, 1), time_s=1.0)
        log.write_value(NoiseScale(2, math.inf, 0.0, math.inf, 2), time_s=1.5)
        log.write_value(
            Verdict(8, 2, "node1", "data", "data", math.inf, 0.2, 0.8, 4, "others take no time"), time_s=1.0
        )
        end(log)
    summary = write_reports(tmp_path)
    written = (tmp_path / "summary.json").read_text()
    assert json.loads(written, parse_constant=pytest.fail) == summary
    assert (summary["metrics"]["loss"], summary["noise_scale"], summary["culprit"]["slowdown"]) == (None, None, None)
    assert "loss: -" in text(summary)


@pytest.mark.parametrize(
    ("cause", "hint"),
    [
        ("data", "num_workers"),
        ("gc", "gc.freeze()"),
        ("compute", "check clocks"),
        ("outside", "expected_slow"),
        ("cpu_contention", "OMP_NUM_THREADS"),
        ("uneven_work", "balance the batches"),
        ("something new", "look at node1"),
    ],
)
def test_every_cause_has_its_advice(tmp_path, cause, hint):
    with RunLog(tmp_path) as log:
        start(log, mode="observe")
        lockstep(log, range(1, 21), slow=2)
        verdict(log, cause=cause)
        plan(log, "advised")
    said = text(summarise(read(tmp_path)))
    assert re.search(rf"next: .*{re.escape(hint)}.*; or mode=\"auto\" trains around it", said)
    assert "done:   nothing was changed (mode observe); advice: rank 2 attached to rank 0" in said
    assert "4.0x faster to accuracy predicted; not measured: it was not carried out" in said


def test_in_auto_mode_nobody_is_told_to_use_auto():
    assert 'mode="auto"' not in words.advice("compute", "node0", "auto")


def test_a_plan_that_made_it_worse_is_not_called_faster(tmp_path):
    with RunLog(tmp_path) as log:
        start(log)
        lockstep(log, range(1, 41), slow=2)
        verdict(log)
        plan(log, "adopted")
        gain(log, measured=0.8)
    assert "gain:   0.80x of the former pace to accuracy measured, 4.0x predicted" in text(summarise(read(tmp_path)))


def test_of_several_runs_in_one_log_the_last_counts(tmp_path):
    finish(attached_run(tmp_path))
    with RunLog(tmp_path) as log:
        start(log)
        lockstep(log, range(1, 21))
    summary = summarise(read(tmp_path))
    assert (summary["culprit"], summary["decisions"], summary["steps"], summary["partial"]) == (None, [], 20, True)


def test_reports_are_overwritten(tmp_path):
    attached_run(tmp_path, recovers=False)
    assert write_reports(tmp_path)["partial"] is True
    finish(tmp_path)
    assert write_reports(tmp_path)["partial"] is False
    assert json.loads((tmp_path / "summary.json").read_text())["partial"] is False
    assert "Partial: the log" not in (tmp_path / "report.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run.jsonl", "summary.json"]


def test_without_matplotlib_the_page_has_tables_and_says_how_to_get_charts(tmp_path, monkeypatch):
    finish(attached_run(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("canvas", "lanes", "charts"):
        monkeypatch.delitem(sys.modules, f"paceline.report.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_reports(tmp_path)
    html = Reader((tmp_path / "report.html").read_text())
    assert "svg" not in html.tags
    assert "pip install 'paceline[report]' draws the charts" in html.text
    assert "reason of plan 1" in html.text


@pytest.mark.parametrize("broken", ["draw_all", "render"])
def test_an_error_while_drawing_loses_neither_summary_nor_run(tmp_path, monkeypatch, caplog, broken):
    def fail(*_args, **_kwargs):
        raise ZeroDivisionError("planted")

    finish(attached_run(tmp_path))
    monkeypatch.setattr(*{"draw_all": (charts, "draw_all", fail), "render": (page, "render", fail)}[broken])
    with caplog.at_level(logging.WARNING, logger="paceline"):
        summary = write_reports(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert "ZeroDivisionError: planted" in caplog.text
    if broken == "draw_all":
        html = Reader((tmp_path / "report.html").read_text())
        assert "The charts could not be drawn" in html.text
        assert "Rank 2 on node1 was slow for a while" in html.text
    else:
        assert not (tmp_path / "report.html").exists()
