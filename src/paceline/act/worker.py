"""The worker of parameter servers: turns hooks of the model into pushes and pulls that overlap with the user's loop.

A gradient leaves bucket by bucket while backward goes on. The answer has a lease first and the parameters after it: the
loop reads its next batch meanwhile, and the forward pass waits for what is still missing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from paceline.act.attach import Pace
from paceline.act.channel import header
from paceline.act.messages import Buffers, Up, timing_header
from paceline.act.pulse import Pulse, wait_for
from paceline.act.relay import Relay
from paceline.act.server import Place
from paceline.act.shards import Shards
from paceline.act.upstream import Answer, Expelled, ServerLink
from paceline.decide.ledger import Lease, Ledger
from paceline.errors import ConfigError, PacelineError
from paceline.measure import taps
from paceline.measure.timers import GcTimer, StepClock
from paceline.types import Phase, Rank

logger = logging.getLogger("paceline")
_GRACE_S = 2.0  # for threads to end


class WorkerPace(Pace):
    """`Pace` of a worker: hooks in, links up; nothing is applied here.

    Args:
        place: Who we are.
        module: The user's model.
        optimizer: The user's; its steps do nothing.
        scaler: The loop's GradScaler, if it has one.
        shards: How the model is cut.
        wire_dtype: What gradients and parameters travel in.
    """

    def __init__(
        self,
        place: Place,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        shards: Shards,
        wire_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._place = place
        self._scaler = scaler
        self._shards = shards
        self._wire_dtype = wire_dtype
        self._params: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self._buffers = Buffers(list(module.buffers()))
        self._outgoing = torch.zeros(shards.num_elements, dtype=wire_dtype)
        self._incoming = torch.empty(shards.num_elements, dtype=wire_dtype)
        self._clock = StepClock(place.rank)
        self._links: list[ServerLink] = []
        self._pulse: Pulse | None = None
        self._epoch = -1
        self._version = 0
        self._lease: Lease | None = None
        self._samples = 0
        self._is_pushed = True  # as if: the first answer comes unasked
        self._is_stale = True  # parameters are on their way
        self._is_void = False  # what is being computed is no use to anybody any more
        self._skips_push = False
        self._may_begin = False
        self._missing: list[set[int]] = []  # by bucket: parameters without a gradient so far
        self._next_bucket = 0
        self._buffers_before = self._buffers.gather()
        self._stashed: list[Tensor | None] = []
        self._closed = False
        self._install(module, optimizer)

    def _install(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self._before_forward),
            optimizer.register_step_pre_hook(self._before_optimizer),
            optimizer.register_step_post_hook(self._after_optimizer),
        ]
        for i, param in enumerate(self._params):
            hook = functools.partial(self._on_gradient, i)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))
        taps.add_listener(self)
        self._gc_timer = GcTimer(self._clock.gc_pause)
        atexit.register(self.close)

    # ---- links -----------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Knock at the servers' door, as a newcomer; the first answer brings parameters and a lease."""
        store, place = self._place.store, self._place
        number = store.add("joins", 1)
        if self._pulse is not None:
            self._pulse.close()
        self._pulse = Pulse(store, f"link{number}", place.peers, place.silence_s)
        store.set(f"join/{number}", json.dumps({"rank": place.rank}))
        self._relay = Relay(store, number, self._shards, self._wire_dtype, place.peers)
        self._links = self._relay.links = [
            ServerLink(
                store, number, server, self._shards, self._buffers.size, self._wire_dtype, place.peers,
                place.num_workers + server, self._relay,
            )
            for server in range(place.num_servers)
        ]  # fmt: skip
        for server in range(place.num_servers):
            self._pulse.watch(f"server{server}", functools.partial(self._note_silent, place.num_workers + server))
        self._is_pushed = self._is_stale = True
        self._lease = None
        self._samples = 0

    def _note_silent(self, rank: Rank, silence_s: float) -> None:
        self._place.peers.silent(rank, f"no sign of life for {silence_s:.0f} s (stopped, or cut off)")

    def _knock_again(self) -> None:
        logger.warning("this worker was silent for so long that the servers went on without it: it comes back")
        self._leave_links()
        self._join()

    def _leave_links(self) -> None:
        self._relay.leave(header(Up.BYE, self._epoch + 1))

    def _receive(self) -> None:
        """Wait for the chief's answer to what was pushed: a lease, and word that parameters are coming."""
        self._clock.enter(Phase.WAIT)
        if not self._links:
            self._join()
        while True:
            try:
                answer: Answer = self._links[0].answer.wait()
                break
            except Expelled:
                self._knock_again()
        self._end_step()
        self._is_pushed = False
        self._version, self._lease = answer.version, answer.lease
        self._clock.enter(Phase.OTHER)

    def _pull(self) -> None:
        """Wait for the parameters that are on their way, and take them over."""
        self._clock.enter(Phase.WAIT)
        if self._is_pushed:
            self._receive()
            self._clock.enter(Phase.WAIT)
        try:
            for server, link in enumerate(self._links):
                link.parameters.wait()
                for bucket, part in enumerate(link.messages):
                    self._shards.message(self._incoming, server, bucket).copy_(part)
        except Expelled:
            # The batch that was read for these parameters belongs to somebody else by now.
            self._knock_again()
            self._receive()
            self._is_void = True
            self._pull()
            return
        self._shards.scatter(self._incoming, self._params)
        self._buffers.scatter(self._links[0].buffers)
        self._buffers_before = self._links[0].buffers.clone()
        self._is_stale = False

    def _forget_gradient(self) -> None:
        """What was computed belonged to samples that somebody else has by now."""
        self._is_void, self._samples = False, 0
        for p in self._params:
            p.grad = None

    def _accumulate(self) -> None:
        """Ask for one more batch of the gradient that is being accumulated."""
        self._clock.enter(Phase.WAIT)
        try:
            self._lease = self._links[0].ask_for_more(self._epoch).wait().lease
        except Expelled:
            self._knock_again()
            self._receive()
            self._forget_gradient()
        self._clock.enter(Phase.OTHER)

    # ---- hooks: what happens during a step, in order -----------------------------------------------------------------

    def begin_epoch(self) -> None:
        """The loop begins an epoch over leased samples."""
        if self._closed:
            raise ConfigError("training goes on after pace.close(): the servers have ended; close after the last step")
        self._epoch += 1
        if not self._is_pushed:  # what was accumulated and not sent counts as dropped by now
            self._samples = 0

    def next_lease(self) -> Lease | None:
        """The loop asks for a batch; None when its epoch is over."""
        self._place.peers.check()
        if self._is_pushed:
            self._receive()
        if self._is_void:
            self._forget_gradient()
        if self._lease is None:  # no gradient was sent since the last batch: it is being accumulated
            self._accumulate()
        lease = self._lease
        if lease is None or lease.epoch > self._epoch:
            return None
        self._lease = None
        self._samples += len(lease)
        return lease

    def before_fetch(self) -> None:
        """A batch is about to be read."""
        self._clock.enter(Phase.DATA)

    def after_fetch(self) -> None:
        """The batch is there."""
        self._clock.enter(Phase.OTHER)

    def _before_forward(self, _module: torch.nn.Module, _args: Any) -> None:
        if self._closed:
            return
        self._place.peers.check()
        if self._ledger is None:
            if torch.is_grad_enabled():
                raise ConfigError("parameter servers hand out the samples: take the batches from pace.data(...)")
            return
        if self._is_stale:
            self._pull()
        self._clock.enter(Phase.FORWARD if torch.is_grad_enabled() else Phase.OTHER)

    def before_backward(self) -> None:
        """The autograd engine is about to run, perhaps for another model: the first gradient of ours begins a push."""
        self._clock.enter(Phase.BACKWARD)
        self._may_begin = not (self._closed or self._skips_push)

    def _begin_push(self) -> None:
        if self._is_void:
            return
        if self._is_pushed:
            raise PacelineError(
                "a second backward pass since the last batch, and the first one's gradient is already on its way: "
                "put all but the last one under pace.no_sync()"
            )
        if self._is_stale:
            raise PacelineError(
                "the gradient is of parameters that are not the servers': call the model itself, net(x), and neither "
                "its forward() nor a part of it, since the call is when parameters are taken over"
            )
        if not self._samples:
            raise ConfigError("parameter servers hand out the samples: take the batches from pace.data(...)")
        cancelled = any(link.is_cancelled for link in self._links)
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        self._relay.begin(self._version, self._samples, scale, abandons=cancelled)
        self._is_pushed = self._is_stale = True
        self._next_bucket = 0
        self._missing = [] if cancelled else [set(bucket) for bucket in self._shards.buckets]

    def _on_gradient(self, index: int, param: Tensor) -> None:
        """A parameter's gradient is there; if its bucket is, that leaves."""
        if self._may_begin:
            self._may_begin = False
            self._begin_push()
        if self._missing:
            assert param.grad is not None
            self._shards.view(self._outgoing, index).copy_(param.grad)
            for bucket in self._shards.buckets_of[index]:
                self._missing[bucket].discard(index)
            self._send_buckets()

    def _send_buckets(self) -> None:
        """Buckets leave in the order in which servers expect them."""
        while self._next_bucket < len(self._missing) and not self._missing[self._next_bucket]:
            self._relay.send(self._outgoing, self._next_bucket)
            self._next_bucket += 1

    def after_backward(self, error: BaseException | None) -> None:
        """The autograd engine has run; parameters without a gradient count as zero."""
        self._clock.enter(Phase.OTHER)
        self._may_begin = False
        if not self._missing:
            return
        if error is not None:
            raise PacelineError(
                "the backward pass failed with a part of its gradient already on its way; this worker cannot go on"
            ) from error
        for i in (i for missing in self._missing for i in missing):
            grad = self._params[i].grad
            view = self._shards.view(self._outgoing, i)
            view.zero_() if grad is None else view.copy_(grad)
        for missing in self._missing:
            missing.clear()
        self._send_buckets()
        self._relay.end(self._buffers.gather() - self._buffers_before)
        self._missing = []

    def _before_optimizer(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._clock.enter(Phase.OPTIMIZER)
        # Optimizers skip parameters without a gradient: nothing is applied here.
        self._stashed = [p.grad for p in self._params]
        for p in self._params:
            p.grad = None

    def _after_optimizer(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for p, gradient in zip(self._params, self._stashed, strict=True):
            p.grad = gradient
        self._stashed = []
        self._clock.enter(Phase.OTHER)

    def _end_step(self) -> None:
        """A step that sent a gradient has ended with the answer to it."""
        if self._is_void or not self._samples:
            self._clock.discard_step()
        else:
            timing = self._clock.close_step(self._version + 1, self._samples)
            self._links[0].send([timing_header(timing)])
        self._is_void = False
        self._samples = 0

    def begin_expected(self, name: str) -> None:  # noqa: ARG002 - the log is the chief's
        """A stretch begins that must not count (`paceline.expected_slow`)."""
        self._clock.begin_expected()

    def end_expected(self) -> None:
        """The stretch ends."""
        self._clock.end_expected()

    # ---- the user's side -----------------------------------------------------------------------------------------

    def _world_size(self) -> int:
        return self._place.num_workers

    def _begin_leases(self, ledger: Ledger) -> None:
        if self._ledger is not None:
            raise ConfigError("pace.data(...) was already called; lease one data set per served model")
        self._ledger = ledger
        told = json.loads(wait_for(self._place.store, "data", self._place.peers))
        if told != [ledger.num_samples, ledger.batch_size]:
            raise ConfigError(
                f"all ranks must lease the same data: the servers know {told[0]} samples in batches of {told[1]}, "
                f"this worker has {ledger.num_samples} in batches of {ledger.batch_size}"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backward passes in here send nothing."""
        before, self._skips_push = self._skips_push, True
        try:
            yield
        finally:
            self._skips_push = before

    def close(self) -> None:
        """Leave the training; returns with the final parameters, when all others have left it too."""
        if self._closed:
            return
        failed = self._place.peers.failure is not None
        try:
            if self._links and not failed:
                self._settle()
        finally:
            self._uninstall()

    def _settle(self) -> None:
        if self._is_pushed:
            self._receive()
        if self._is_stale:
            self._pull()
        for link in self._links:
            link.expect()
        self._leave_links()
        self._is_pushed, self._is_stale = False, True
        self._pull()
        for link in self._links:
            link.end(timeout_s=_GRACE_S)

    def _uninstall(self) -> None:
        self._closed = True
        for handle in self._handles:
            handle.remove()
        taps.remove_listener(self)
        self._gc_timer.close()
        if self._pulse is not None:
            self._pulse.close()
        atexit.unregister(self.close)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is None:
            self.close()
            return
        if self._links and not self._missing:  # in the middle of a gradient servers expect the rest, or its end
            with contextlib.suppress(Exception):
                self._leave_links()  # the others go on without this worker
        self._uninstall()
