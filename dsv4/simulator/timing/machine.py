"""Rates of a GPU per clock: the numbers behind the time model.

Every number is either measured and published (the source is named beside it) or an assumption that
no public table settles. `ASSUMED` names these; `dataclasses.replace` adjusts any of them.

Sources: [MMA] and [MEM] SemiAnalysisAI/microbench-blackwell at 9a068d8 (fit_results.csv of
umma_latency and tput_results_max.csv of umma_throughput; the memory tables); [FA4] the unit rates
of the FlashAttention-4 paper; [H200] this project's own measurements on one H200; [PG] the CUDA
programming guide's tables.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

# (CTAs, M, N) -> cycles per instruction and latency of a single one, A in shared memory, then
# both with A in TMEM. The same for every format; K is 32 bytes of A. [MMA]
TCGEN05_MMA = {
    (1, 64, 64): (32.0, 152, 32.0, 136),
    (1, 64, 128): (64.0, 184, 64.0, 168),
    (1, 64, 256): (128.0, 248, 128.0, 232),
    (1, 128, 64): (48.0, 168, 32.0, 136),
    (1, 128, 96): (56.0, 184, 48.0, 152),
    (1, 128, 128): (64.0, 200, 64.0, 168),
    (1, 128, 256): (128.0, 264, 128.0, 232),
    (2, 128, 64): (25.0, 173, 18.0, 162),
    (2, 128, 128): (32.0, 197, 32.0, 178),
    (2, 128, 256): (64.0, 229, 64.0, 210),
    (2, 256, 64): (43.0, 202, 32.0, 170),
    (2, 256, 128): (64.0, 234, 64.0, 202),
    (2, 256, 256): (128.0, 298, 128.0, 266),
}

# N -> cycles of wgmma m64nNk16, or its like of 32 bytes of K; A in shared memory, in registers.
WGMMA_SHARED = {32: 24.2, 64: 32.2, 128: 64.2, 256: 128.4}  # [H200]
WGMMA_REGISTERS = {32: 16.4, 64: 32.4, 256: 128.8}  # [H200]


@dataclass(frozen=True)
class Machine:
    """One GPU. Times in cycles of `clock_ghz`, rates per cycle and SM unless said otherwise."""

    name: str
    multiprocessors: int
    clock_ghz: float
    hbm_bytes_per_second: float
    l2_bytes: float  # one SM's share of L2's output, all SMs loading different bytes
    l2_port_bytes: float  # of different bytes, to one SM of few
    landing_bytes: float  # into one SM, of bytes that its neighbours want too
    multicast_bytes: float  # landed by multicast copies of what memory delivers
    store_bytes: float  # one SM's share of what L2 takes, all SMs storing
    store_port_bytes: float  # from one SM of few
    l2_capacity: int  # bytes
    shared_bytes: float  # shared-memory port
    shared_memory: int  # bytes per SM
    cluster_bytes: float  # from shared memory of another SM
    cluster_latency: float
    # --- sub-core issue: cycles that one warp instruction occupies a pipe
    fma_cycles: float
    fma_packed_cycles: float  # f32x2
    alu_cycles: float
    mufu_cycles: float
    convert_cycles: float
    # --- latencies
    arithmetic_latency: float
    mufu_latency: float
    shuffle_latency: float
    shared_latency: float
    global_latency: float
    memory_latency: float  # TMA load, issue to arrival, nothing else under way
    memory_queue: float  # that much longer, as a part of it, when memory is fully used
    # --- asynchronous units
    tensor_drain: float  # from the last wgmma's end to its registers
    tmem_bytes: float  # of each warp's quarter of TMEM
    tmem_latency: float
    copy_issue: float  # TMA engine, per instruction
    barrier_latency: float  # mbarrier completion to the waiting warp
    named_barrier_latency: float
    cluster_barrier_latency: float
    fence_latency: float
    flag_latency: float  # from a release at GPU scope to the CTAs that wait for it
    # --- launches
    launch_us: float  # of a kernel in a graph
    first_access_us: float  # until the first load of a launch is issued: code and parameters
    dependent_launch_us: float  # of one that may start before the one it depends on has ended
    cta_start: float  # a CTA in the place of one that has ended
    port_floor: float  # rate left to ordinary accesses beside operand reads that fill the port
    # --- power: the clock sinks with the part of the time that all tensor pipes work
    boost_ghz: float
    power_ghz: float  # lost when they work all the time

    def microseconds(self, cycles: float) -> float:
        """Cycles as time."""
        return cycles / (1e3 * self.clock_ghz)

    def sustained_ghz(self, load: float) -> float:
        """The clock that power allows while tensor pipes work for `load` of the time."""
        return min(self.clock_ghz, self.boost_ghz - self.power_ghz * load)

    @property
    def assumed(self) -> str:
        """How much of the model no measurement settles, to stand beside its predictions."""
        return f"{len(ASSUMED[self.name])} of its {self.figures} figures are assumptions"

    @property
    def figures(self) -> int:
        """How many numbers the model of this GPU rests on, beside the table of products."""
        return sum(field.type in ("float", "int") for field in fields(self))

    @property
    def hbm_bytes(self) -> float:
        """HBM bytes per cycle of the whole GPU."""
        return self.hbm_bytes_per_second / (1e9 * self.clock_ghz)

    def tcgen05_mma(self, ctas: int, m: int, n: int, a_in_tmem: bool) -> tuple[float, float]:
        """(cycles per instruction, further cycles until a waiter sees the last one).

        Shapes that [MMA] does not list are scaled from the nearest N of the same M, but never below
        what reading the operands from shared memory takes.
        """
        place = 2 if a_in_tmem else 0
        row = TCGEN05_MMA.get((ctas, m, n))
        if row is not None:
            return row[place], row[place + 1] - row[place]
        rows = m if (ctas, m, 128) in TCGEN05_MMA else 64  # M = 32 exists in one form only
        near = min((k[2] for k in TCGEN05_MMA if k[:2] == (ctas, rows)), key=lambda k: abs(k - n))
        row = TCGEN05_MMA[ctas, rows, near]
        scaled = row[2] * n / near
        operands = 32 * ((0 if a_in_tmem else m) + n) / ctas / self.shared_bytes
        return max(scaled, operands), row[place + 1] - row[place]

    def wgmma(self, n: int, a_in_registers: bool) -> float:
        """Cycles of one wgmma of 64 rows; other N by the nearest larger ones' rate."""
        table = WGMMA_REGISTERS if a_in_registers else WGMMA_SHARED
        near = min((k for k in table if k >= n), default=max(table))
        scaled = table[near] * n / near
        return scaled if a_in_registers else max(scaled, 32 * (64 + n) / self.shared_bytes)


# Names of the fields that no public measurement settles, by machine.
ASSUMED_EVERYWHERE = (
    "fma_packed_cycles", "arithmetic_latency", "mufu_latency", "shuffle_latency", "shared_latency",
    "global_latency", "tmem_bytes", "tmem_latency", "copy_issue", "barrier_latency",
    "named_barrier_latency", "fence_latency", "cta_start", "tensor_drain",
)  # fmt: skip
ASSUMED = {
    "B200": (
        *ASSUMED_EVERYWHERE, "l2_bytes", "l2_port_bytes", "landing_bytes", "multicast_bytes",
        "store_bytes", "store_port_bytes", "alu_cycles", "convert_cycles", "cluster_bytes",
        "cluster_latency", "cluster_barrier_latency", "launch_us", "dependent_launch_us",
        "first_access_us", "memory_queue", "port_floor", "power_ghz", "flag_latency",
    ),
    "H200": ASSUMED_EVERYWHERE,
}  # fmt: skip

B200 = Machine(
    name="B200",
    multiprocessors=148,
    clock_ghz=1.965,  # [MEM] cycles per nanosecond
    hbm_bytes_per_second=7.1e12,  # [MEM] 7.06-7.26 measured with 64-128 KB in flight per SM
    l2_bytes=48.0,
    l2_port_bytes=64.0,
    landing_bytes=96.0,
    multicast_bytes=48.0,
    store_bytes=17.0,
    store_port_bytes=31.0,
    l2_capacity=126 << 20,  # [PG]
    shared_bytes=128.0,  # [FA4], and the operand-bound rows of [MMA]
    shared_memory=228 << 10,  # [PG]
    cluster_bytes=16.0,  # [H200] 15 to 19, whatever the instruction
    cluster_latency=500.0,  # [H200] half of a remote mbarrier's round trip
    fma_cycles=1.0,  # [PG] 128 lanes
    fma_packed_cycles=2.0,
    alu_cycles=2.0,
    mufu_cycles=8.0,  # [FA4] 16 lanes
    convert_cycles=2.0,
    arithmetic_latency=4.0,
    mufu_latency=20.0,
    shuffle_latency=24.0,
    shared_latency=30.0,
    global_latency=300.0,
    memory_latency=900.0,  # [MEM] 512 bytes by TMA, one in flight
    memory_queue=0.6,
    tensor_drain=0.0,  # in the latencies of [MMA]
    tmem_bytes=128.0,
    tmem_latency=30.0,
    copy_issue=8.0,
    barrier_latency=20.0,
    named_barrier_latency=20.0,
    cluster_barrier_latency=400.0,
    fence_latency=20.0,
    flag_latency=1850.0,
    launch_us=0.6,
    first_access_us=0.2,
    dependent_launch_us=0.25,
    cta_start=700.0,
    port_floor=0.05,
    boost_ghz=1.965,
    power_ghz=0.0,
)

H200 = Machine(
    name="H200",
    multiprocessors=132,
    clock_ghz=1.77,  # [H200] under tensor load, before power throttling sets in
    hbm_bytes_per_second=4.5e12,  # [H200] read ceiling, 64 KB in flight per SM
    l2_bytes=37.0,  # [H200] 65 bytes per ns: 8.65 TB/s with all SMs
    l2_port_bytes=56.0,  # [H200] 99 bytes per ns with 33 or 66 SMs
    landing_bytes=90.0,  # [H200] 159 bytes per ns where 8 neighbours want the same
    multicast_bytes=21.0,  # [H200] 2.0 to 2.9 TB/s of distinct bytes for pairs
    store_bytes=13.0,  # [H200] GEMM outputs: 3.06 TB/s with all SMs
    store_port_bytes=31.0,  # [H200] GEMM outputs: 55 bytes per ns with 32 SMs
    l2_capacity=50 << 20,  # [PG]
    shared_bytes=128.0,
    shared_memory=228 << 10,  # [PG]
    cluster_bytes=16.0,  # [H200] 15 to 19, whatever the instruction
    cluster_latency=500.0,  # [H200] half of a remote mbarrier's round trip
    fma_cycles=1.0,  # [H200] 115 of 128 per cycle
    fma_packed_cycles=2.0,
    alu_cycles=2.0,  # [H200] prmt and max: 62 per cycle
    mufu_cycles=8.0,  # [H200] ex2: 16 per cycle
    convert_cycles=2.0,  # [H200] 62 per cycle
    arithmetic_latency=4.0,
    mufu_latency=20.0,
    shuffle_latency=24.0,
    shared_latency=30.0,
    global_latency=300.0,
    memory_latency=830.0,  # [H200] 16 KB in flight on 4 SMs: 33 bytes per ns and SM
    memory_queue=0.6,  # [H200] 1.10, 1.25, 1.31 and 1.54 times as long at a load of .42 to .93
    tensor_drain=32.0,
    tmem_bytes=128.0,
    tmem_latency=0.0,
    copy_issue=8.0,
    barrier_latency=20.0,
    named_barrier_latency=20.0,
    cluster_barrier_latency=400.0,  # [H200] 360 to 435
    fence_latency=20.0,
    flag_latency=1660.0,  # [H200] 0.94 us, release add and acquire spin of all CTAs at once
    launch_us=0.6,  # [H200] empty node of a graph
    first_access_us=0.2,  # [H200] 8 KB a CTA: 0.79 longer than empty, 0.55 the copy
    dependent_launch_us=0.25,  # [H200] nodes that do little gain 0.36 by programmatic dependence
    cta_start=700.0,
    port_floor=0.05,  # [H200] STS beside SS n = 64: 6 bytes per cycle
    # [H200] 1.80, 1.77, 1.61 and 1.55 GHz beside GEMMs of load 0.39, 0.47, 0.70 and 0.80, 10 ms
    boost_ghz=1.98,
    power_ghz=0.5,
)

MACHINES = {"sm_100a": B200, "sm_90a": H200}
