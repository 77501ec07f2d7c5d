"""mbarriers by their purpose: rings of stages, buffers of one stage, signals; parities by cursor.

A producer `acquire`s a stage (waits until it is empty) and fills it: by TMA, whose bytes `expect`
announces, or by the warps of a role, which `commit`. A consumer `wait`s until it is full and
`release`s it. Waits are attributed to their callers in line information: a race report, or a test
that deletes one of them, names the role.

The arrival counts come from the `BarrierGraph` of a plan: `init` initialises what it derives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Boolean, Constexpr, Int32, const_expr, cute
from cutlass.cutlass_dsl import dsl_user_op

from dsv4.kernels.kit.plan import BarrierGraph


class Cursor(NamedTuple):
    """A role's place in a ring: the stage, and the parity of the phase that it waits for next."""

    stage: Int32
    phase: Int32


@cute.jit
def arrive_warp(barrier: cute.Pointer, lane, lanes_per_warp, count=1):
    """Arrivals of a warp, usually one, after every lane's reads and writes.

    One lane arrives for its warp after a warp sync; a checker that follows every thread by itself
    needs all 32.
    """
    cute.arch.sync_warp()
    if lane < lanes_per_warp:
        cute.arch.mbarrier_arrive(barrier, arrive_count=count)


@dataclass(frozen=True)
class Signal:
    """`stages` mbarriers without a way back: another edge keeps the producer from running ahead."""

    full: cute.Pointer
    lanes_per_warp: int = 1

    def at(self, stage) -> Signal:
        """The mbarrier of a stage."""
        return Signal(self.full + stage, self.lanes_per_warp)

    def arrive(self, lane) -> None:
        """The arrival of a warp."""
        arrive_warp(self.full, lane, self.lanes_per_warp)

    @dsl_user_op
    def wait(self, phase, *, loc=None, ip=None) -> None:
        cute.arch.mbarrier_wait(self.full, phase, loc=loc, ip=ip)


@dataclass(frozen=True)
class Buffer:
    """One stage between a producer and its consumers; its phases are the roles' own."""

    full: cute.Pointer
    empty: cute.Pointer
    lanes_per_warp: int = 1

    @dsl_user_op
    def acquire(self, phase, *, loc=None, ip=None) -> None:
        """Wait until the buffer is empty."""
        cute.arch.mbarrier_wait(self.empty, phase, loc=loc, ip=ip)

    @dsl_user_op
    def is_empty(self, phase, *, loc=None, ip=None) -> Boolean:
        """What `acquire` would wait for, in this thread's view."""
        return cute.arch.mbarrier_test_wait(self.empty, phase, loc=loc, ip=ip)

    @dsl_user_op
    def expect(self, tx_bytes: int, *, loc=None, ip=None) -> None:
        """The producer's arrival, with the bytes that TMA adds; one thread calls this."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full, tx_bytes, loc=loc, ip=ip)

    def commit(self, lane) -> None:
        """The arrival of a producing warp."""
        arrive_warp(self.full, lane, self.lanes_per_warp)

    @dsl_user_op
    def wait(self, phase, *, loc=None, ip=None) -> None:
        """Wait until the buffer is full."""
        cute.arch.mbarrier_wait(self.full, phase, loc=loc, ip=ip)

    @dsl_user_op
    def is_full(self, phase, *, loc=None, ip=None) -> Boolean:
        """What `wait` would wait for, in this thread's view."""
        return cute.arch.mbarrier_test_wait(self.full, phase, loc=loc, ip=ip)

    def release(self, lane) -> None:
        """The arrival of a consuming warp."""
        arrive_warp(self.empty, lane, self.lanes_per_warp)


@dataclass(frozen=True)
class Ring:
    """`stages` buffers in turn, each of `parts` with mbarriers of their own."""

    is_fenced = False  # whether a consumer that has tested a barrier must fence

    full: cute.Pointer
    empty: cute.Pointer
    stages: int
    parts: int = 1
    lanes_per_warp: int = 1

    def producer(self) -> Cursor:
        """Where a producer begins: every stage is empty."""
        return Cursor(Int32(0), Int32(1))

    def consumer(self) -> Cursor:
        """Where a consumer begins."""
        return Cursor(Int32(0), Int32(0))

    def slot(self, cursor: Cursor, part=0):
        """Index of a part of a stage among all of the ring's."""
        if self.parts == 1:
            return cursor.stage
        return cursor.stage * self.parts + part

    def at(self, slot) -> Buffer:
        """The mbarriers of a slot, for a role that computes its index or address early."""
        return Buffer(self.full + slot, self.empty + slot, self.lanes_per_warp)

    @cute.jit
    def next(self, cursor: Cursor) -> Cursor:
        """The stage after; the parity flips where the ring wraps."""
        stage, phase = cursor
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase ^= 1
        return Cursor(stage, phase)

    @cute.jit
    def previous(self, cursor: Cursor) -> Cursor:
        """The stage before."""
        stage, phase = cursor
        stage -= 1
        if stage < 0:
            stage = Int32(self.stages - 1)
            phase ^= 1
        return Cursor(stage, phase)

    @cute.jit
    def skip(self, cursor: Cursor, count) -> Cursor:
        """Some stages further on, at most once around the ring."""
        stage, phase = cursor
        stage += count
        if stage >= self.stages:
            stage -= self.stages
            phase ^= 1
        return Cursor(stage, phase)

    @dsl_user_op
    def acquire(self, cursor: Cursor, part=0, *, loc=None, ip=None) -> None:
        """Wait until a part of a stage is empty."""
        cute.arch.mbarrier_wait(self.empty + self.slot(cursor, part), cursor.phase, loc=loc, ip=ip)

    @dsl_user_op
    def expect(self, slot, tx_bytes: int, *, loc=None, ip=None) -> None:
        """The producer's arrival, with the bytes that TMA adds; one thread calls this."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot, tx_bytes, loc=loc, ip=ip)

    @dsl_user_op
    def wait(self, cursor: Cursor, part=0, *, loc=None, ip=None) -> None:
        """Wait until a part of a stage is full."""
        cute.arch.mbarrier_wait(self.full + self.slot(cursor, part), cursor.phase, loc=loc, ip=ip)

    @dsl_user_op
    def is_full(self, cursor: Cursor, part=0, *, loc=None, ip=None) -> Boolean:
        """What `wait` would wait for, in this thread's view."""
        return cute.arch.mbarrier_test_wait(
            self.full + self.slot(cursor, part), cursor.phase, loc=loc, ip=ip
        )

    def release(self, cursor: Cursor, lane, part=0, arrivals=1) -> None:
        """Arrivals of a consuming warp, usually one."""
        arrive_warp(self.empty + self.slot(cursor, part), lane, self.lanes_per_warp, arrivals)

    @cute.jit
    def release_to(self, cursor: Cursor, lane, ctas: Constexpr, is_read: Constexpr = False) -> None:
        """The arrival of a consuming warp in each CTA of its cluster, or in its own.

        An arrival overtakes loads of shared memory that are on their way, and the copies that it
        lets in, tokens' scales of a later k block, then arrive before them: without the fence an
        H200 gave other sums in the last columns of FP8 experts, in 7 of 24 calls of 8,192 tokens,
        and, without a cluster, in each of 256. `.release.cluster` would order them, too, and waits
        for global memory as well.

        Args:
            is_read: whether something else has waited for the warp's loads of the stage: products
                that overwrite what came of them, or that have read it themselves.
        """
        if const_expr(not is_read):
            cute.arch.fence_acq_rel_cta()
        if const_expr(ctas == 1):
            self.release(cursor, lane)
        else:
            cute.arch.sync_warp()
            if lane < ctas:
                cute.arch.mbarrier_arrive(self.empty + cursor.stage, lane)


@dataclass(frozen=True)
class FencedBuffer(Buffer):
    """A buffer that ordinary stores or cp.async fill, and that products read."""

    @dsl_user_op
    def wait(self, phase, *, loc=None, ip=None) -> None:
        """Wait until the buffer is full, and fence for the async proxy."""
        cute.arch.mbarrier_wait(self.full, phase, loc=loc, ip=ip)
        cute.arch.fence_view_async_shared(loc=loc, ip=ip)


@dataclass(frozen=True)
class FencedRing(Ring):
    """A ring that ordinary stores or cp.async fill, and that products read: they do so through the
    async proxy, for which the consumer fences after its wait, or after a test that it relies on."""

    is_fenced = True

    def at(self, slot) -> Buffer:
        return FencedBuffer(self.full + slot, self.empty + slot, self.lanes_per_warp)

    @dsl_user_op
    def wait(self, cursor: Cursor, part=0, *, loc=None, ip=None) -> None:
        """Wait until a part of a stage is full, and fence for the async proxy."""
        self.at(self.slot(cursor, part)).wait(cursor.phase, loc=loc, ip=ip)


def pipeline(graph: BarrierGraph, storage, name: str, parts: int = 1) -> Ring | Buffer | Signal:
    """The mbarriers of an edge: a signal, the buffer of one stage, or a ring.

    Args:
        storage: shared memory with the graph's `split_buffers`.
        parts: of a ring's stage, each a stage of the edge.
    """
    edge, lanes = graph[name], graph.lanes_per_warp
    full = getattr(storage, f"{name}_full").data_ptr()
    if edge.is_signal:
        return Signal(full, lanes)
    empty = getattr(storage, f"{name}_empty").data_ptr()
    if edge.stages == 1:
        return Buffer(full, empty, lanes)
    return Ring(full, empty, edge.stages // parts, parts, lanes)


def init(graph: BarrierGraph, pipelines: dict[str, Ring | Buffer | Signal], **factors) -> None:
    """Initialise mbarriers with the arrivals that the graph derives; one thread calls this, and
    fences.

    Args:
        pipelines: by the names of their edges.
        factors: runtime factors of the arrivals, by name.
    """
    for name, pipe in pipelines.items():
        stages = graph[name].stages
        for index, arrivals in graph.initial_counts(name, **factors):
            is_full = index < stages
            barriers = pipe.full + index if is_full else pipe.empty + (index - stages)
            cute.arch.mbarrier_init(barriers, arrivals)
