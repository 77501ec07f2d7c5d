"""One warp: registers, divergence stack, special registers, and the loop that runs its blocks."""

from __future__ import annotations

from collections import deque

import numpy as np

from dsv4.simulator.compile.codegen import BLOCKED, DIVERGED
from dsv4.simulator.errors import KernelFault, SimulatorError
from dsv4.simulator.instructions.operands.wgmma_accumulators import Accumulators
from dsv4.simulator.machine.memory import SYSTEM_SHARED_BYTES, Cta

ALL = np.ones(32, np.bool_)
LANE = np.arange(32, dtype=np.uint32)
_PER_LANE = {
    "%laneid": LANE,
    "%lanemask_eq": np.uint32(1) << LANE,
    "%lanemask_lt": (np.uint32(1) << LANE) - np.uint32(1),
    "%lanemask_le": (np.uint32(2) << LANE) - np.uint32(1),
    "%lanemask_gt": ~((np.uint32(2) << LANE) - np.uint32(1)),
    "%lanemask_ge": ~((np.uint32(1) << LANE) - np.uint32(1)),
}
_ALL_BYTES, _NONE_BYTES = ALL.tobytes(), bytes(32)


class Frame:
    """A group of lanes that run together: next block, lanes, and the block where they rejoin."""

    __slots__ = ("block", "mask", "mask_bytes", "rejoin")

    def __init__(self, block: int, mask: np.ndarray, mask_bytes: bytes, rejoin: int):
        self.block, self.mask, self.mask_bytes, self.rejoin = block, mask, mask_bytes, rejoin


class Warp:
    """Execution state of one warp. Generated code calls it `w`."""

    def __init__(self, program, cta: Cta, number: int, launch):
        self.program, self.cta, self.cluster, self.launch = program, cta, cta.cluster, launch
        self.number = number
        self.registers = list(program.registers.initial)
        threads = launch.threads - 32 * number
        live = ALL if threads >= 32 else threads > LANE
        self.mask, self.mask_bytes = live, live.tobytes()
        self.frames = [Frame(0, live, self.mask_bytes, program.exit)]
        self.done = False
        self.polling = False  # set by instructions that may be part of a spin loop
        self.waiting = ""  # what a blocked warp waits for
        self.at = 0  # instruction being executed, where anything can go wrong
        self.shared_base = np.full(32, cta.base + SYSTEM_SHARED_BYTES, np.uint32)
        self.base = np.uint32(cta.base)
        self.lane0 = 32 * (number % 4)  # first TMEM lane of the warp
        self.special_registers: dict[str, np.ndarray] = {}
        self.local: np.ndarray | None = None
        self.carry = np.zeros(32, np.int64)
        self.register_count = launch.registers_at_launch  # of a thread
        self.register_changes: list = []  # RegisterChange of each setmaxnreg executed
        self.turn = 0  # the last turn it had, of all warps' turns
        self.moved_in = 0  # the last turn in which it did more than wait
        self.executed = 0  # instructions
        self.informed_in = 0  # the last turn in which the warp may have learnt of others' progress
        self.bar_ticket: tuple[int, int] | None = None
        self.bar_values: list[np.ndarray] = []
        # Generation of the cluster barrier at which each thread arrived and has not waited, or -1.
        self.cluster_tickets = np.full(32, -1, np.int64)
        # Asynchronous work tied to the warp.
        self.bulk_open: list = []
        self.bulk_groups: deque = deque()
        self.bulk_read = 0  # the oldest of the groups that are known to have read their sources
        self.copy_open: list = []
        self.copy_groups: deque = deque()
        self.wgmma_pending: deque = deque()  # products not waited for
        self.accumulators = Accumulators(self.registers)  # of wgmma
        self.wgmma_issued = self.wgmma_steps = 0
        self.wgmma_fenced = False  # no register of wgmma touched since the last wgmma.fence
        self.wgmma_groups: deque[int] = deque()  # last product of each committed group
        self.tmem_loads: list = []
        self.tmem_stores: list = []
        self.unsettled = False  # registers may still be written by what was issued
        self.unwaited_loads = False
        self.pending_loads: dict[int, int] = {}  # register -> its tcgen05.ld; for the checker
        self.agent = 0  # number in the checker
        self.order = None  # the checker's, of the warp's lanes
        self.collectives = 0  # executed by all lanes together
        self.ticks = 0

    # --- special registers -----------------------------------------------------------------------
    def special(self, name: str) -> np.ndarray:
        """A special register as uint32 [32]."""
        value = self.special_registers.get(name)
        if value is None:
            value = self.special_registers[name] = self._special(name)
        return value

    def _special(self, name: str) -> np.ndarray:
        launch, cta, number = self.launch, self.cta, self.number
        stem, _, axis = name.partition(".")
        if stem in _PER_LANE:
            return _PER_LANE[stem]
        x, y, _ = launch.block
        cluster = launch.cluster
        size = cluster[0] * cluster[1] * cluster[2]
        if stem == "%tid":
            linear = LANE + np.uint32(32 * number)
            before = {"x": 1, "y": x, "z": x * y}[axis]
            return linear // np.uint32(before) % np.uint32(launch.block["xyz".index(axis)])
        vectors = {
            "%ntid": launch.block,
            "%nctaid": launch.grid,
            "%ctaid": cta.index,
            "%cluster_ctaid": tuple(i % c for i, c in zip(cta.index, cluster)),
            "%cluster_nctaid": cluster,
            "%clusterid": tuple(i // c for i, c in zip(cta.index, cluster)),
            "%nclusterid": tuple(-(-g // c) for g, c in zip(launch.grid, cluster)),
        }
        scalars = {
            "%cluster_ctarank": cta.rank,
            "%cluster_nctarank": size,
            "%is_explicit_cluster": int(size > 1),
            "%warpid": number,
            "%nwarpid": 64,
            "%smid": (cta.cluster.number % launch.clusters_per_gpu * size + cta.rank)
            % launch.multiprocessors,
            "%nsmid": launch.multiprocessors,
            "%gridid": 0,
            "%envreg1": launch.config.workspace >> 32,
            "%envreg2": launch.config.workspace & 0xFFFFFFFF,
            "%dynamic_smem_size": launch.shared,
            "%total_smem_size": launch.shared + launch.static_shared,
        }
        if stem in vectors and axis in ("x", "y", "z"):
            value = vectors[stem]["xyz".index(axis)]
        elif name in scalars:
            value = scalars[name]
        else:
            raise KernelFault(f"special register {name} is not simulated")
        return np.full(32, value, np.uint32)

    def clock(self, dtype: type) -> np.ndarray:
        """A counter that only ever grows; simulated time has no other meaning here."""
        self.ticks += 1
        return np.full(32, self.ticks & 0xFFFFFFFF, dtype)

    # --- control flow ----------------------------------------------------------------------------
    def branch_full(self, taken: np.ndarray, target: int, other: int, rejoin: int) -> int:
        """Next block of a conditional branch with all lanes active."""
        pattern = taken.tobytes()
        if pattern == _ALL_BYTES:
            return target
        if pattern == _NONE_BYTES:
            return other
        return self._diverge(taken, target, other, rejoin)

    def branch_masked(self, taken: np.ndarray, target: int, other: int, rejoin: int) -> int:
        """Next block of a conditional branch with some lanes active."""
        taken = taken & self.mask
        pattern = taken.tobytes()
        if pattern == self.mask_bytes:
            return target
        if pattern == _NONE_BYTES:
            return other
        return self._diverge(taken, target, other, rejoin)

    def _diverge(self, taken: np.ndarray, target: int, other: int, rejoin: int) -> int:
        self.frames[-1].block = rejoin
        rest = self.mask & ~taken
        if other != rejoin:
            self.frames.append(Frame(other, rest, rest.tobytes(), rejoin))
        if target != rejoin:
            self.frames.append(Frame(target, taken, taken.tobytes(), rejoin))
        return DIVERGED

    def exit_lanes(self, lanes: np.ndarray, next_block: int) -> int:
        """Guarded exit: `lanes` stop for good, the others go on."""
        gone = (lanes & self.mask).copy()
        self._retire(gone)
        if not self.frames:
            return DIVERGED
        top = self.frames[-1]
        if top.mask_bytes != self.mask_bytes:
            top.block = next_block
            return DIVERGED
        return next_block

    def _retire(self, gone: np.ndarray) -> None:
        for frame in self.frames:
            frame.mask = frame.mask & ~gone
            frame.mask_bytes = frame.mask.tobytes()
        self.frames = [f for f in self.frames if f.mask_bytes != _NONE_BYTES]

    def run(self) -> bool:
        """Run one turn: until blocked, polling, done or the quantum of blocks is used up.

        True if at least one block completed.
        """
        self.waiting = ""
        try:
            return self._run()
        except KernelFault as fault:
            raise KernelFault(f"{fault}\n  at {self.location()}") from fault
        except SimulatorError:
            raise
        except Exception as error:
            raise SimulatorError(
                f"internal error {type(error).__name__}: {error}\n  at {self.location()}"
            ) from error

    def location(self) -> str:
        """Where the warp is, for error messages."""
        ins = self.program.entry.instructions[self.at]
        return f"{self.cta.name} warp {self.number}, {ins.where()}"

    def _run(self) -> bool:
        program, registers = self.program, self.registers
        hits, sizes, exit_block = program.hits, program.sizes, program.exit
        left = self.launch.quantum
        progressed = swapped = False
        if self.polling:
            self.informed_in = self.turn
        self.turn, self.polling = self.launch.turn, False
        while self.frames:
            frame = self.frames[-1]
            if frame.block == frame.rejoin or frame.block == exit_block:
                self.frames.pop()
                if frame.block == exit_block:
                    self._retire(frame.mask)
                continue
            self.mask, self.mask_bytes = frame.mask, frame.mask_bytes
            table = program.full if self.mask_bytes == _ALL_BYTES else program.masked
            block, rejoin = frame.block, frame.rejoin
            while True:
                following = table[block](self, registers)
                if following >= 0:
                    hits[block] += 1
                    self.executed += sizes[block]
                    progressed, swapped = True, False
                    if following in (rejoin, exit_block):
                        frame.block = following
                        break
                    block = following
                    left -= 1
                    if self.polling or not left:
                        frame.block = block
                        return progressed
                elif following == BLOCKED:
                    frame.block = block
                    if swapped or not self._swap_sibling(frame):
                        return progressed
                    swapped = True
                    break
                else:
                    hits[block] += 1
                    progressed, swapped = True, False
                    break
        self.done = True
        return True

    def _swap_sibling(self, blocked: Frame) -> bool:
        """Independent thread scheduling: let the other side of a divergence run meanwhile."""
        if len(self.frames) < 2:
            return False
        other = self.frames[-2]
        if other.rejoin != blocked.rejoin or other.block == other.rejoin:
            return False
        if (other.mask & blocked.mask).any():
            return False
        self.frames[-1], self.frames[-2] = other, blocked
        return True

    # --- asynchronous register writes ------------------------------------------------------------
    def settle(self) -> None:
        """Perform asynchronous work whose registers are about to be used."""
        for operation in self.tmem_loads:
            operation()
        self.tmem_loads = []
        if self.unwaited_loads and self.launch.monitor is not None:
            self.launch.monitor.tmem_used(self)
        self.unwaited_loads = False
        for product in self.wgmma_pending:
            product.perform()
        self.accumulators.write()
        self.unsettled = False

    def complete_wgmma(self, last: int) -> None:
        """The wgmmas up to number `last` are waited for."""
        while self.wgmma_pending and self.wgmma_pending[0].number <= last:
            self.wgmma_pending.popleft().perform()
