"""A kernel ready to run: blocks, register map and lazily compiled block functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from dsv4.simulator.arithmetic import integers, numerics
from dsv4.simulator.compile import codegen, vectorise, wgmma_registers
from dsv4.simulator.compile.registers import RegisterMap, unwritten_reads
from dsv4.simulator.compile.tmem_registers import TmemRegisters, check_loads
from dsv4.simulator.errors import KernelFault, UnsupportedInstruction
from dsv4.simulator.instructions import (
    atomics,
    branch,
    collectives,
    compare,
    convert,
    cp_async,
    device_print,
    fences,
    floats,
    hints,
    launch_control,
    load_store,
    matrix,
    mbarrier,
    mma_sync,
    move,
    named_barriers,
    refused,
    setmaxnreg,
    tcgen05,
    tensor_map_edits,
    tma,
    wgmma,
)
from dsv4.simulator.instructions import integers as integer_instructions
from dsv4.simulator.machine import memory
from dsv4.simulator.machine.warp import ALL
from dsv4.simulator.ptx.blocks import blocks_of
from dsv4.simulator.ptx.entry import Entry
from dsv4.simulator.ptx.modifiers import check_modifiers
from dsv4.simulator.ptx.shared_names import Allocation

# Families of instructions: importing one registers its emitters, whose generated code calls its
# public functions by name.
FAMILIES = (
    atomics, branch, collectives, compare, convert, cp_async, device_print, fences, floats, hints,
    integer_instructions, launch_control, load_store, matrix, mbarrier, mma_sync, move,
    named_barriers, refused, setmaxnreg, tcgen05, tensor_map_edits, tma, wgmma,
)  # fmt: skip


CALLED = (*FAMILIES, numerics, integers, vectorise, memory)


def functions_of(module) -> dict[str, object]:
    """What generated code may use of a module: its public names but for emitters."""
    emitters = set(map(id, codegen.EMITTERS.values()))
    public = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return {name: value for name, value in public if id(value) not in emitters}


def _namespace() -> dict[str, object]:
    """What generated code may call."""
    names: dict[str, object] = {"np": np, "where": np.where, "ALL": ALL, "bool_": np.bool_}
    for module in CALLED:
        names.update(functions_of(module))
    names.update(check_products=wgmma_registers.check_products, check_loads=check_loads)
    return names


MOST_THREADS, MOST_THREADS_Z = 1024, 64  # of a CTA
MOST_CTAS_YZ = 65535  # of a grid
MOST_PORTABLE_CTAS, MOST_CLUSTER_CTAS = 8, 16  # of a cluster, without and with the attribute
Size = tuple[int, int, int]


class Program:
    """One entry function, compiled block by block as warps first reach them.

    Args:
        entry: the parsed kernel.
        global_address: addresses of module-level variables in host memory.
        allocations: of dynamic shared memory, in order, as far as they are known.
    """

    def __init__(
        self,
        entry: Entry,
        global_address: dict[str, int],
        allocations: Sequence[Allocation] = (),
    ):
        self.entry = entry
        for ins in entry.instructions:
            codegen.emitter_of(ins)  # unknown opcodes are an error before anything runs
            check_modifiers(ins)
        _check_initial_values(entry)
        self.blocks = blocks_of(entry)
        self.exit = len(self.blocks)
        self.registers = RegisterMap(entry, self.blocks)
        self.u32_at = [True] * len(self.registers.index)
        for name, index in self.registers.index.items():
            self.u32_at[index] = self.registers.kind[name] != "f32"
        self.unwritten_reads = unwritten_reads(entry)
        self.hits = [0] * (len(self.blocks) + 1)
        self.sizes = [block.stop - block.start for block in self.blocks]
        # Instructions that synchronise, by block.
        self.sync = [
            [i for i in entry.instructions[b.start : b.stop] if codegen.is_sync(i.opcode)]
            for b in self.blocks
        ]
        self.symbols, self.static_shared, self.local_bytes = self._place(global_address)
        self._name_shared(allocations)
        self.namespace = _namespace()
        # Guarded synchronisation instructions whose guard has been true: see coverage.py.
        self.guards_taken: set[int] = set()
        self.namespace["guards_taken"] = self.guards_taken
        self.full: list[Callable] = [self._compiler(i, True) for i in range(self.exit)]
        self.masked: list[Callable] = [self._compiler(i, False) for i in range(self.exit)]

    def _place(self, global_address: dict[str, int]):
        """Addresses of every symbol: (space, address) by name, static shared and local sizes."""
        symbols: dict[str, object] = {
            name: ("param", memory.PARAM_WINDOW + offset)
            for name, (offset, _) in self.entry.params.items()
        }
        shared = local = 0
        dynamic = []
        for symbol in self.entry.symbols.values():
            if symbol.space == "shared" and symbol.size is None:
                dynamic.append(symbol)
            elif symbol.space == "shared":
                shared = -(-shared // symbol.align) * symbol.align
                symbols[symbol.name] = ("shared", shared)
                shared += symbol.size
            elif symbol.space == "local":
                local = -(-local // symbol.align) * symbol.align
                symbols[symbol.name] = ("local", local)
                local += symbol.size or 0
            else:
                symbols[symbol.name] = ("global", global_address[symbol.name])
        # The dynamic area follows the static variables, at its own alignment within the window.
        base = memory.SYSTEM_SHARED_BYTES
        for symbol in dynamic:
            start = -(-(base + shared) // symbol.align) * symbol.align - base
            symbols[symbol.name] = ("shared", start)
            shared = start
        symbols["asynchronous registers"] = self._registers_of("tcgen05.ld", "wgmma.mma_async")
        symbols["tcgen05.ld registers"] = TmemRegisters(self.entry, self.registers)
        symbols["wgmma conflicts"] = wgmma_registers.WgmmaRegisters(self.entry).conflicts
        symbols["wgmma registers"] = self._registers_of("wgmma.mma_async", operands=2)
        return symbols, shared, -(-local // 16) * 16

    def _name_shared(self, allocations: Sequence[Allocation]) -> None:
        """Names of shared memory, for messages: static variables, then what is allocated."""
        names, base = self.entry.shared_names, memory.SYSTEM_SHARED_BYTES
        for symbol in self.entry.symbols.values():
            if symbol.space == "shared" and symbol.size is not None:
                names.add(base + self.symbols[symbol.name][1], symbol.size, symbol.name)
        names.add_allocations(base + self.static_shared, allocations)

    def _registers_of(self, *opcodes: str, operands: int = 1) -> frozenset[str]:
        """Registers in the first operands of some opcodes."""
        out: set[str] = set()
        for ins in self.entry.instructions:
            if ins.opcode.startswith(opcodes):
                for operand in ins.operands[:operands]:
                    if operand.startswith("{"):
                        out.update(codegen.BlockEmitter.vector(operand))
        return frozenset(out)

    def _compiler(self, number: int, full: bool) -> Callable:
        def compile_and_run(w, R):
            function = self._compile(number, full)
            (self.full if full else self.masked)[number] = function
            return function(w, R)

        return compile_and_run

    def _compile(self, number: int, full: bool) -> Callable:
        emitter = codegen.BlockEmitter(
            self.entry, self.registers, self.blocks[number], full, self.symbols
        )
        source = emitter.source()
        for name, value in emitter.constants.items():
            self.namespace.setdefault(name, value)
        code = compile(source, f"<{self.entry.name[:40]} block {number}>", "exec")
        exec(code, self.namespace)
        return self.namespace[codegen.function_name(number, full)]


def _check_initial_values(entry: Entry) -> None:
    """Raise UnsupportedInstruction if the entry uses a variable whose initial value is unknown."""
    refused = {symbol.name: symbol.refused for symbol in entry.symbols.values() if symbol.refused}
    for ins in entry.instructions if refused else ():
        for name in re.findall(r"[\w$]+", ins.text):
            if name in refused:
                raise UnsupportedInstruction(f"{refused[name]}: {ins.where()}")


def check_launchable(
    entry: Entry, grid: Size, block: Size, cluster: Size, non_portable: bool
) -> None:
    """Sizes of a launch must be such as a GPU takes, and those the kernel was compiled for."""
    threads, ctas = (size[0] * size[1] * size[2] for size in (block, cluster))
    if threads > MOST_THREADS:
        raise KernelFault(f"launched with block {block}: {threads} threads, of {MOST_THREADS}")
    if block[2] > MOST_THREADS_Z:
        raise KernelFault(f"launched with block {block}: z is {MOST_THREADS_Z} at most")
    if max(grid[1:]) > MOST_CTAS_YZ:
        raise KernelFault(f"launched with grid {grid}: y and z are {MOST_CTAS_YZ} at most")
    if ctas > MOST_CLUSTER_CTAS:
        raise KernelFault(f"launched with cluster {cluster}: {ctas} CTAs, of {MOST_CLUSTER_CTAS}")
    if ctas > MOST_PORTABLE_CTAS and not non_portable:
        raise KernelFault(
            f"launched with cluster {cluster}: {ctas} CTAs; more than {MOST_PORTABLE_CTAS} need "
            "the attribute cudaFuncAttributeNonPortableClusterSizeAllowed (non_portable=True of "
            "simulate_ptx)"
        )
    if entry.threads is not None and entry.threads != tuple(block):
        raise KernelFault(f"launched with block {block}, compiled for {entry.threads}")
