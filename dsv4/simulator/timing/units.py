"""The parts of an SM that warps share, as servers that remember until when they are taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dsv4.simulator.timing.machine import Machine

SUBCORES = 4


@dataclass(slots=True)
class Server:
    """One thing at a time, in the order of requests."""

    free: float = 0.0
    busy: float = 0.0

    def take(self, now: float, cycles: float) -> float:
        """Occupy it for `cycles` from `now` or when it gets free; the time when it is done."""
        self.free = max(self.free, now) + cycles
        self.busy += cycles
        return self.free


@dataclass(slots=True)
class RecentLoad:
    """Load of a server over the last `span` cycles or so."""

    span: float
    asked: float = 0.0
    last: float = 0.0

    def add(self, now: float, cycles: float) -> float:
        """The part of the time, `cycles` of work at `now` included."""
        self.asked = self.asked * math.exp(min(self.last - now, 0.0) / self.span) + cycles
        self.last = max(self.last, now)
        return min(1.0, self.asked / self.span)


@dataclass
class SubCore:
    """Issue slots and arithmetic pipes of a quarter of an SM, and its path to TMEM.

    On Hopper each quarter has its own tensor core.
    """

    issue: Server = field(default_factory=Server)
    pipes: dict[str, Server] = field(
        default_factory=lambda: {name: Server() for name in ("fma", "alu", "mufu")}
    )
    tensor: Server = field(default_factory=Server)
    tmem: Server = field(default_factory=Server)


class SharedPort:
    """The port of shared memory. Operand reads of the tensor pipe go first; ordinary accesses get
    what those leave, and never less than a small floor."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.free = self.busy = self.operands = 0.0
        self.tensor_until = 0.0
        self.tensor_share = 0.0

    def operand_reads(self, until: float, cycles: float, size: float) -> None:
        """The tensor pipe reads `size` bytes during its next `cycles`, which end at `until`."""
        taken = size / self.machine.shared_bytes
        self.tensor_until, self.tensor_share = until, min(1.0, taken / cycles)
        self.operands += taken

    def access(self, now: float, wavefronts: int) -> float:
        """Ordinary passes through the port; the time when they are done."""
        begin = max(now, self.free)
        rate = max(1.0 - self.tensor_share, self.machine.port_floor)
        beside = max(0.0, self.tensor_until - begin)
        if wavefronts <= beside * rate:
            self.free = begin + wavefronts / rate
        else:
            self.free = begin + beside + wavefronts - beside * rate
        self.busy += wavefronts
        return self.free


@dataclass(frozen=True, slots=True)
class MemoryRates:
    """Bytes per cycle that one SM gets from global memory or sends there, through L2."""

    loads: float
    multicast: float  # landed in one SM
    stores: float
    memory: float = 0.0  # part of what memory can deliver, while every SM loads all it can


class Sm:
    """All units of one SM.

    Args:
        rates: bytes per cycle between this SM and global memory.
    """

    def __init__(self, machine: Machine, rates: MemoryRates):
        self.machine = machine
        self.rates = rates
        self.subcores = [SubCore() for _ in range(SUBCORES)]
        self.port = SharedPort(machine)
        self.tensor = Server()  # of Blackwell
        self.copies = Server()  # TMA instructions
        self.recent = RecentLoad(2 * machine.memory_latency)
        self.inbound = Server()  # L2 and memory, with what goes out
        self.loads = Server()  # the ordinary part of what comes in
        self.outbound = Server()
        self.cluster = Server()  # shared memory of other SMs

    def fetch(self, now: float, size: int, latency: float, multicast: bool = False) -> float:
        """A bulk copy from global memory, behind those before it; the time when it is here."""
        rate = self.rates.multicast if multicast else self.rates.loads
        cycles = size / rate
        load = self.rates.memory * self.recent.add(now, cycles)
        latency *= 1 + self.machine.memory_queue * load**2
        return self.inbound.take(now, cycles) + latency

    def receive(self, now: float, size: int) -> float:
        """A bulk copy from another SM of the cluster; the time when it is here."""
        machine = self.machine
        return self.cluster.take(now, size / machine.cluster_bytes) + machine.cluster_latency

    def load(self, now: float, size: int, latency: float) -> float:
        """An ordinary load: it shares the bandwidth, but bulk copies do not hold it up."""
        cycles = size / self.rates.loads
        self.inbound.take(now, cycles)
        return self.loads.take(now, cycles) + latency

    def send(self, now: float, size: int) -> float:
        """Bytes to global memory; the time when they have left. No warp waits for them on the way,
        but memory serves loads later."""
        self.inbound.take(now, size / self.rates.loads)
        return self.outbound.take(now, size / self.rates.stores)

    def busy(self) -> dict[str, float]:
        """Cycles by unit, a quarter's units averaged."""

        def mean(get) -> float:
            return sum(get(core).busy for core in self.subcores) / SUBCORES

        return {
            "tensor pipe": self.tensor.busy + mean(lambda core: core.tensor),
            "MUFU": mean(lambda core: core.pipes["mufu"]),
            "FMA": mean(lambda core: core.pipes["fma"]),
            "ALU": mean(lambda core: core.pipes["alu"]),
            "issue": mean(lambda core: core.issue),
            "SMEM port": self.port.busy + self.port.operands,
            "TMEM": mean(lambda core: core.tmem),
            "TMA issue": self.copies.busy,
            "cluster": self.cluster.busy,
            "memory": self.inbound.busy,
        }
