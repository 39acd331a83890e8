"""The executor: the same bits on all ranks, the exact sum, and a broken call that names its culprit and takes nothing.

Groups of real processes run many cases each, as forking one per case is too dear. A child checks against sums that it
works out itself; the parent compares the bits of all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.act import executor as executor_module
from paceline.act.executor import DTYPES, CollectivePlan, Executor
from paceline.act.local import Outcome, run_local
from paceline.act.program import compile_program
from paceline.act.wire import Buffers
from paceline.collective.classic import direct, halving_doubling, ring, tree
from paceline.collective.late import around_one
from paceline.collective.late_many import around_many
from paceline.errors import ConfigError, PeerError

pytestmark = pytest.mark.beside


@dataclass(frozen=True)
class Case:
    """One all-reduce; integer-valued data has an exact sum in every dtype, rounding or not."""

    late: int
    num_chunks: int
    numel: int
    dtype: torch.dtype
    op: str = "sum"
    integers: bool = True
    max_numel: int | None = None
    num_lanes: int = 2

    def inputs(self, n: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.numel + self.late)
        if self.integers:
            return [torch.randint(-4, 5, (self.numel,), generator=generator).to(self.dtype) for _ in range(n)]
        return [torch.randn(self.numel, generator=generator).to(self.dtype) for _ in range(n)]

    def expected(self, inputs: Sequence[Tensor]) -> Tensor:
        total = torch.stack([x.double() for x in inputs]).sum(0)
        if self.integers:  # the sum is exact, and is divided in the dtype
            total = total.to(self.dtype)
        return total / len(inputs) if self.op == "avg" else total


def build(rank: int, n: int, **options: Any) -> Executor:
    executor_module.MIN_RANKS = 2  # in this forked process: also where it does not pay
    options = {"timeout_s": 20.0, **options}
    return Executor(dist.distributed_c10d._get_default_store(), rank, range(n), **options)


def reduced(executor: Executor, rank: int, n: int, case: Case) -> str:
    """Carry out a case, check it, and return a digest of the result."""
    inputs = case.inputs(n)
    tensor = inputs[rank].clone()
    executor.all_reduce(tensor, case.op)
    expected = case.expected(inputs)
    if case.integers:
        assert torch.equal(tensor, expected), case
    else:
        # n - 1 roundings of partial sums, and one of the quotient.
        bound = n * torch.finfo(case.dtype).eps * torch.stack([x.double().abs() for x in inputs]).sum(0)
        assert bool(((tensor.double() - expected).abs() <= bound).all()), case
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def run_cases(rank: int, n: int, cases: Sequence[Case], wire: Any, pause: Callable[[], None] = lambda: None) -> Any:
    """Carry out all cases; return the digests."""
    executor = build(rank, n, wire=wire)
    digests = []
    for case in cases:
        executor.use(CollectivePlan(around_one(n, case.late, case.num_chunks), case.max_numel, case.num_lanes))
        pause()
        digests.append(reduced(executor, rank, n, case))
    return digests


def same_on_all(outcomes: list[Outcome]) -> None:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    assert all(outcome.value == outcomes[0].value for outcome in outcomes)


@pytest.mark.parametrize("n", range(2, 10))
@pytest.mark.timeout(60)
def test_all_ranks_get_the_same_bits_whoever_is_late(n: int) -> None:
    kinds = cycle([(dtype, op, integers) for integers in (True, False) for dtype in DTYPES for op in ("sum", "avg")])
    chunks = cycle([max(n - 1, 1), 2 * (n - 1), 5, 1])
    cases = [
        Case(late, next(chunks), numel, *next(kinds)) for late in range(n) for numel in (0, 1, n - 1, 13, 211, 2003)
    ]
    same_on_all(run_local(run_cases, n, n, cases, None, timeout_s=55.0))


@st.composite
def some_case(draw: st.DrawFn, n: int) -> Case:
    numel = draw(st.one_of(st.integers(0, 40), st.sampled_from([997, 4093, 10007])))
    quarters = draw(st.none() | st.integers(0, 5))
    return Case(
        draw(st.integers(0, n - 1)),
        draw(st.integers(1, 4 * n)),
        numel,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(["sum", "avg"])),
        draw(st.booleans()),
        None if quarters is None else numel * quarters // 4,
        draw(st.sampled_from([1, 2, 2, 3])),
    )


# Every example is a whole process group: few of them, and no shrinking. Hypothesis's first example is always the
# simplest one, nothing but empty buffers here; the second is drawn.
@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@pytest.mark.parametrize("n", [4, 5, 6, 7])
@pytest.mark.timeout(60)
@given(data=st.data())
def test_any_sizes_chunks_types_and_splits(n: int, data: st.DataObject) -> None:
    cases = data.draw(st.lists(some_case(n), min_size=40, max_size=40))
    same_on_all(run_local(run_cases, n, n, cases, None, timeout_s=55.0))


@pytest.mark.timeout(60)
def test_batches_of_a_round_give_the_same_bits_as_streams() -> None:
    cases = [Case(late, 9, 1009, dtype, "avg", False) for late in range(5) for dtype in DTYPES]
    streamed = run_local(run_cases, 5, 5, cases, "streamed", timeout_s=25.0)
    batched = run_local(run_cases, 5, 5, cases, "batched", timeout_s=25.0)
    same_on_all([*streamed, *batched])


@pytest.mark.parametrize("numel", [0, 1, 2, 5, 60])
def test_both_sides_leave_out_empty_messages_and_agree_on_the_rest(numel: int) -> None:
    for schedule in (around_one(5, 1, 6), ring(5)):
        programs = [compile_program(schedule, position, numel, num_lanes=2) for position in range(5)]
        sent: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        received: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for me, program in enumerate(programs):
            for exchange in (*program.early, *program.completion):
                if exchange.send is not None:
                    sent[me, exchange.send.peer].append((exchange.send.start, exchange.send.stop))
                if exchange.receive is not None:
                    received[exchange.receive.peer, me].append((exchange.receive.start, exchange.receive.stop))
        assert sent == received  # between any two, in the same order
        assert all(start < stop for messages in sent.values() for start, stop in messages)
        assert numel == 0 or len(sent) >= 4


def soak(rank: int, n: int, num_calls: int) -> Any:
    shared, own = random.Random(0), random.Random(rank)
    cases = [
        Case(shared.randrange(n), shared.choice([4, 8, 16]), shared.randrange(30_000), shared.choice(DTYPES))
        for _ in range(num_calls)
    ]
    return run_cases(rank, n, cases, None, lambda: time.sleep(own.choice([0.0, 0.0, 0.0, 0.001, 0.005])))


@pytest.mark.timeout(60)
def test_random_delays_sizes_and_late_ranks() -> None:
    same_on_all(run_local(soak, 5, 5, 120, timeout_s=55.0))


def any_schedule(rank: int, n: int) -> Any:
    executor = build(rank, n)
    digests = []
    many = around_many(n, (1, 4), 3 * (n - 2))
    for schedule in (halving_doubling(n), tree(n), direct(n), many):
        executor.use(CollectivePlan(schedule))
        for numel, dtype, integers in product((1, 40, 1009), (torch.float32, torch.bfloat16), (True, False)):
            case = Case(0, 1, numel, dtype, "avg", integers)
            digests.append(reduced(executor, rank, n, case))
    executor.use(CollectivePlan(ring(n)))
    executor._wire = None  # type: ignore[assignment]  # the backend's own is called: nothing may reach the wire
    digests.append(reduced(executor, rank, n, Case(0, 1, 1009, torch.float64, "avg")))
    return digests


@pytest.mark.timeout(40)
@pytest.mark.parametrize("n", [6, 7])
def test_any_schedule_runs_and_the_ring_is_the_backends_own(n: int) -> None:
    same_on_all(run_local(any_schedule, n, n, timeout_s=35.0))


def for_the_backend(rank: int, n: int) -> Any:
    """Everything here must bypass the schedule: reaching the wire fails."""
    executor = build(rank, n)
    executor_module.MIN_RANKS = 4
    executor.use(CollectivePlan(around_one(n, 0, max(n - 1, 1))))
    executor._wire = None  # type: ignore[assignment]
    tensors: list[tuple[Tensor, str]] = [
        (torch.full((3,), float(rank)), "max"),
        (torch.full((3,), rank), "sum"),
        (torch.full((3,), complex(rank, 1)), "sum"),
        (torch.full((3,), float(rank)).to_sparse(), "sum"),
    ]
    if n <= 3:
        tensors.append((torch.full((3,), float(rank)), "sum"))
    for tensor, op in tensors:
        executor.all_reduce(tensor, op)
    return [tensor.to_dense().tolist() for tensor, _ in tensors]


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.timeout(30)
def test_what_does_not_fit_goes_to_the_backend(n: int) -> None:
    outcomes = run_local(for_the_backend, n, n, timeout_s=25.0)
    same_on_all(outcomes)
    total = sum(range(n))
    assert outcomes[0].value[:4] == [[n - 1.0] * 3, [total] * 3, [complex(total, n)] * 3, [float(total)] * 3]
    assert outcomes[0].value[4:] == [[float(total)] * 3] * (n <= 3)


def disagree(rank: int, n: int) -> Any:
    executor = build(rank, n)
    plans = []
    odd = rank == 1
    for late, num_chunks in ((2, 4), (2, 8 if odd else 4), (2, 4), (3 if odd else 2, 4), (0, 4)):
        executor.use(CollectivePlan(around_one(n, late, num_chunks)))
        tensor = torch.full((10,), float(rank))
        executor.all_reduce(tensor)
        plans.append((executor.plan.is_native, tensor.tolist()))
    return plans


@pytest.mark.timeout(30)
def test_different_plans_fall_back_to_the_backend_on_all_ranks() -> None:
    outcomes = run_local(disagree, 4, 4, timeout_s=25.0)
    same_on_all(outcomes)
    assert outcomes[0].value == [(native, [6.0] * 10) for native in (False, True, False, True, False)]


def begin_before_the_late_rank_comes(rank: int, n: int, late: int) -> Any:
    """The late rank comes only when all early ranks have begun all calls: a `begin` that waits for it never returns."""
    executor = build(rank, n)
    executor.use(CollectivePlan(around_one(n, late, 8), 600))
    store = dist.distributed_c10d._get_default_store()
    if rank == late:
        store.wait([f"begun/{other}" for other in range(n) if other != late])
    buckets = [torch.arange(float(numel)) * (rank + 1) for numel in (1000, 500, 0, 37)]
    calls = [executor.begin(bucket) for bucket in buckets]
    if rank != late:
        store.set(f"begun/{rank}", "")
    for call in calls:
        call.complete()
    return [bool(torch.equal(bucket, torch.arange(float(len(bucket))) * sum(range(n + 1)))) for bucket in buckets]


@pytest.mark.timeout(40)
def test_beginning_several_calls_does_not_wait_for_the_late_rank() -> None:
    outcomes = run_local(begin_before_the_late_rank_comes, 5, 5, 3, timeout_s=35.0)
    same_on_all(outcomes)
    assert outcomes[0].value == [True] * 4


def test_a_plan_for_other_ranks_is_refused() -> None:
    def use(rank: int) -> None:
        build(rank, 2).use(CollectivePlan(around_one(4, 0, 3)))

    for outcome in run_local(use, 2, timeout_s=20.0):
        assert outcome.error_type == "ConfigError"
        assert "for 4 ranks cannot run on 2" in str(outcome.error)
    for wrong in ({"max_numel": -1}, {"num_lanes": 0}):
        with pytest.raises(ConfigError):
            CollectivePlan(**wrong)


LATE, N, IN_THE_REST = 2, 5, -1
# A connection that closes is passed on from rank to rank at once: with a limit of a minute, nobody may wait for it.
LIMITS_S = {"kill": 60.0, "raise": 60.0, "stop": 1.5}
ENDS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def end_in_the_middle(rank: int, victim: int, end: str, at: int, max_numel: int | None, directory: Path) -> Any:
    """The victim ends at its `at`-th addition of the second call; the others tell what they are left with."""
    executor = build(rank, N, timeout_s=LIMITS_S[end])
    executor.use(CollectivePlan(around_one(N, LATE, 12), max_numel))
    executor.all_reduce(torch.ones(1000))
    if rank == victim and at == IN_THE_REST:
        executor._native = lambda *_: ENDS[end]()  # type: ignore[method-assign]
    elif rank == victim:
        count, take_in = 0, Buffers.take_in

        def planted(self: Buffers, *args: Any) -> None:
            nonlocal count
            count += 1
            if count == at:
                if end == "raise":
                    raise ZeroDivisionError("planted")
                ENDS[end]()
            take_in(self, *args)

        Buffers.take_in = planted  # type: ignore[method-assign]
    tensor = torch.randn(300_000, generator=torch.Generator().manual_seed(rank))
    before = tensor.clone()
    try:
        executor.all_reduce(tensor)
    except PeerError as error:
        restored = bool(torch.equal(tensor, before))
        time.sleep(0.3)  # nothing may arrive any more
        with contextlib.suppress(RuntimeError):  # or rank 0, which hosts the store, would wait for the lost one
            dist.distributed_c10d._get_default_store().underlying_store.set(f"left/{victim}", "")
        again = None
        try:
            executor.all_reduce(tensor)
        except PeerError as second:
            again = second is error
        return type(error).__name__, error.rank, restored and bool(torch.equal(tensor, before)), again
    (directory / f"{rank}-finished").touch()
    return None


@pytest.mark.parametrize(
    ("end", "victim", "at", "max_numel"),
    [
        # Early ranks add 6 times among themselves, then in 6 swaps; the late one swaps 24 times.
        ("kill", 1, 2, None),
        ("kill", 3, 10, None),
        ("kill", 0, 9, 200_000),  # hosts the store; split
        ("kill", LATE, 13, None),
        ("kill", 4, IN_THE_REST, 200_000),
        ("stop", 1, 9, None),
        ("stop", LATE, 13, 200_000),
        ("raise", 3, 10, None),
    ],
)
@pytest.mark.timeout(40)
def test_a_rank_lost_in_the_middle_is_named_and_the_input_is_back(
    end: str, victim: int, at: int, max_numel: int | None, tmp_path: Path
) -> None:
    outcomes = run_local(end_in_the_middle, N, victim, end, at, max_numel, tmp_path, timeout_s=20.0)
    assert list(tmp_path.iterdir()) == []
    kind = {"kill": "PeerError", "stop": "PeerTimeout", "raise": "PeerError"}[end]
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error is None
            assert outcome.value == (kind, victim, True, True), outcome.rank
    if end == "raise":
        assert outcomes[victim].error_type == "ZeroDivisionError"


def never_comes(rank: int) -> Any:
    executor = build(rank, 4, timeout_s=1.0)
    executor.use(CollectivePlan(around_one(4, 3, 3)))
    if rank == 3:
        store = dist.distributed_c10d._get_default_store()
        store.wait([f"over/{other}" for other in range(3)])
        return None
    try:
        executor.all_reduce(torch.ones(10))
    except PeerError as error:
        dist.distributed_c10d._get_default_store().set(f"over/{rank}", "")
        return type(error).__name__, error.rank
    return None


@pytest.mark.timeout(30)
def test_a_rank_that_does_not_come_in_time_is_named() -> None:
    outcomes = run_local(never_comes, 4, timeout_s=25.0)
    assert [outcome.value for outcome in outcomes] == [("PeerTimeout", 3)] * 3 + [None]
