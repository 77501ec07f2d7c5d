"""Kernels that are bound by one unit take the time that unit needs, and the model names it."""

from __future__ import annotations

import struct
from dataclasses import fields, replace

import pytest
import torch

from dsv4.cli import sim_table
from dsv4.simulator.frontend.ptx_text import single_launch
from dsv4.simulator.timing import ASSUMED, B200, H200, MACHINES, LaunchPrediction, Machine, predict
from dsv4.simulator.timing.prediction import predict_launch, some_clusters
from dsv4.simulator.timing.recorder import Choose, record
from dsv4.simulator.timing.trace import LaunchTrace
from tests.simulator.timing.kernels import (
    arithmetic_kernel,
    bulk_load_kernel,
    copied_loads_kernel,
    flag_kernel,
    remote_stores_kernel,
    streaming_kernel,
    tensor_load_kernel,
)

pytestmark = pytest.mark.stage("simulator")


def load(
    ctas: int,
    copies: int,
    size: int,
    source: torch.Tensor,
    machine: Machine = H200,
    choose: Choose = lambda count: [0],
) -> LaunchPrediction:
    """Model a launch whose CTAs each load copies * size bytes of `source`: without a neighbour to
    compare with, the model takes them for different bytes."""
    simulation = single_launch(
        bulk_load_kernel(copies, size),
        "load",
        grid=(ctas, 1, 1),
        block=(32, 1, 1),
        shared=copies * size + 64,
        params=(source,),
    )
    return predict(simulation, source, machine=machine, choose=choose).launches[0]


def arithmetic(instruction: str, count: int, threads: int) -> LaunchPrediction:
    simulation = single_launch(
        arithmetic_kernel(instruction, count, threads),
        "arithmetic",
        grid=(1, 1, 1),
        block=(threads, 1, 1),
        params=(),
    )
    return predict(simulation).launches[0]


# An H200 loads 64 or 16 KB per CTA from L2 in one node of a graph, measured: microseconds.
@pytest.mark.parametrize("copies, measured", [(8, 2.23), (2, 1.39)])
def test_nodes_that_load_from_l2(copies, measured):
    source = torch.zeros(8 * 8192, dtype=torch.uint8)
    node = load(132, copies, 8192, source)
    assert node.microseconds == pytest.approx(measured, rel=0.25)


def test_distinct_bytes_come_at_the_rate_of_memory():
    size = 27 * 8192
    # Every CTA its own bytes, as far as the model can tell: it counts the tensor's.
    source = torch.empty(132 * size, dtype=torch.uint8)
    node = load(132, 27, 8192, source)
    streaming = node.cycles - H200.memory_latency
    rate = 132 * size / (H200.microseconds(streaming) * 1e-6)
    assert rate == pytest.approx(H200.hbm_bytes_per_second, rel=0.05)
    assert node.critical_unit == "memory"


def streaming_terabytes(machine: Machine, ctas: int, size: int, stages: int) -> float:
    """TB/s of CTAs that load distinct bytes, `stages` copies of `size` in flight each."""

    def cycles(copies: int) -> float:
        source = torch.empty(ctas * copies * size, dtype=torch.uint8)
        simulation = single_launch(
            streaming_kernel(stages, size, copies),
            "stream",
            grid=(ctas, 1, 1),
            block=(32, 1, 1),
            shared=stages * (size + 8),
            params=(source,),
        )
        return predict(simulation, source, machine=machine).launches[0].cycles

    few, many = 2 * stages, 6 * stages
    moved = ctas * (many - few) * size
    return moved / machine.microseconds(cycles(many) - cycles(few)) / 1e6


# TMA on a B200, all SMs loading: KB in flight per SM -> TB/s. SemiAnalysisAI/microbench-blackwell.
@pytest.mark.parametrize(
    "kilobytes, published", [(4, 1.15), (8, 2.1), (16, 3.6), (32, 5.65), (64, 7.1), (128, 7.1)]
)
def test_bandwidth_by_bytes_in_flight(kilobytes, published):
    terabytes = streaming_terabytes(B200, B200.multiprocessors, 4096, kilobytes // 4)
    assert terabytes == pytest.approx(published, rel=0.2)


# Bulk copies on an H200, one CTA per SM: CTAs, KB in flight each -> TB/s, slopes of graph replays.
@pytest.mark.parametrize(
    "ctas, kilobytes, measured",
    [
        (8, 16, 0.259), (8, 32, 0.470), (8, 64, 0.806),
        (32, 16, 1.000), (32, 32, 1.743), (32, 64, 2.832),
        (64, 16, 1.890), (64, 32, 3.034), (64, 64, 4.199), (64, 128, 4.454),
        (96, 32, 3.812), (96, 64, 4.511),
        (132, 16, 3.268), (132, 32, 4.309), (132, 64, 4.563), (132, 128, 4.580),
    ],
)  # fmt: skip
def test_bandwidth_by_ctas_and_bytes_in_flight(ctas, kilobytes, measured):
    size = 4096 if kilobytes == 16 else 8192
    terabytes = streaming_terabytes(H200, ctas, size, kilobytes * 1024 // size)
    assert terabytes == pytest.approx(measured, rel=0.2)


def test_few_ctas_are_bound_by_their_own_sm():
    size = 27 * 8192
    source = torch.empty(size, dtype=torch.uint8)
    node = load(1, 27, 8192, source)
    assert node.cycles - H200.memory_latency == pytest.approx(size / H200.l2_port_bytes, rel=0.05)


# L2 hits of an H200, bulk copies of 16 KB, 12 in flight: CTAs, whether pairs load the same -> bytes
# per ns and SM.
@pytest.mark.parametrize(
    "ctas, shared, measured",
    [(33, False, 99.4), (66, False, 99.1), (132, False, 65.4), (132, True, 117.1)],
)
def test_rates_of_l2(ctas, shared, measured):
    def cycles(copies: int) -> float:
        source = torch.zeros(copies * 16384, dtype=torch.uint8)
        choose = some_clusters if shared else (lambda count: [0])
        return load(ctas, copies, 16384, source, choose=choose).cycles

    few, many = 4, 12
    rate = (many - few) * 16384 / (1e3 * H200.microseconds(cycles(many) - cycles(few)))
    assert rate == pytest.approx(measured, rel=0.15)


def test_what_is_stored_bounds_a_launch():
    """3.06 TB/s of results, measured beside GEMMs on an H200, however short the rest is."""
    stored = 132 * 4096 * 16
    trace = replace(_load_trace(), clusters=[replace(_load_trace().clusters[0], stored=stored)])
    launch = predict_launch(trace, H200)
    assert launch.cycles >= stored / (H200.store_bytes * 132)


def _load_trace(copies: int = 1) -> LaunchTrace:
    source = torch.zeros(copies * 8192, dtype=torch.uint8)
    simulation = single_launch(
        bulk_load_kernel(copies, 8192),
        "load",
        grid=(1, 1, 1),
        block=(32, 1, 1),
        shared=copies * 8192 + 64,
        params=(source,),
    )
    return record(simulation, (source,), {}, lambda count: [0])[0]


# GHz beside GEMMs on an H200 after 2 to 10 ms -> part of the time that all tensor pipes work.
@pytest.mark.parametrize(
    "clock, tensor_load", [(1.80, 0.39), (1.77, 0.47), (1.61, 0.70), (1.55, 0.80)]
)
def test_clock_under_tensor_load(clock, tensor_load):
    assert H200.sustained_ghz(tensor_load) == pytest.approx(clock, rel=0.05)
    assert B200.sustained_ghz(tensor_load) == B200.clock_ghz


@pytest.mark.parametrize(
    "instruction, threads, unit, cycles",
    [
        ("ex2.approx.ftz.f32 %f{i}, %f{i};", 128, "MUFU", 8),
        ("ex2.approx.ftz.f32 %f{i}, %f{i};", 512, "MUFU", 32),
        ("fma.rn.f32 %f{i}, %f{i}, %f{i}, %f{i};", 512, "issue", 4),
        ("max.f32 %f{i}, %f{i}, %f{i};", 256, "ALU", 4),
    ],
)
def test_throughput_of_arithmetic(instruction, threads, unit, cycles):
    """Cycles per instruction of every warp: an SM has four of each pipe."""
    few, many = (arithmetic(instruction, count, threads) for count in (64, 320))
    assert (many.cycles - few.cycles) / 256 == pytest.approx(cycles, rel=0.05)
    assert many.critical_unit == unit


def test_a_dependent_chain_costs_latency():
    chain = arithmetic("fma.rn.f32 %f0, %f0, %f0, %f0;", 256, 32)
    independent = arithmetic("fma.rn.f32 %f{i}, %f{i}, %f{i}, %f{i};", 256, 32)
    assert chain.cycles > 3.5 * independent.cycles


def test_a_flag_costs_more_than_a_load():
    flag = torch.zeros(4, dtype=torch.int32)

    def cycles(load_instruction: str) -> float:
        simulation = single_launch(
            flag_kernel(load_instruction),
            "wait",
            grid=(1, 1, 1),
            block=(32, 1, 1),
            params=(flag,),
        )
        return predict(simulation, flag).launches[0].cycles

    difference = cycles("ld.acquire.gpu.global.b32") - cycles("ld.global.b32")
    assert difference == pytest.approx(H200.flag_latency - H200.global_latency, rel=0.05)


def test_stores_to_another_sm_come_at_the_rate_of_its_memory():
    """15 to 19 bytes per cycle and SM on an H200, by st.async as by bulk copies."""

    def launch(count: int) -> LaunchPrediction:
        simulation = single_launch(
            remote_stores_kernel(count),
            "stores",
            grid=(2, 1, 1),
            block=(32, 1, 1),
            cluster=(2, 1, 1),
            shared=1024,
            params=(),
        )
        return predict(simulation, machine=H200).launches[0]

    few, many = launch(8), launch(72)
    assert 15 <= 64 * 512 / (many.cycles - few.cycles) <= 19
    assert many.busy["TMA issue"] == 0 and many.critical_unit == "cluster"


def test_nothing_waits_to_copy_a_register():
    """The machine code has no such copies: loads beside them are under way together."""
    words = torch.zeros(8 * 32, dtype=torch.int32)

    def cycles(count: int, copies: str) -> float:
        kernel = copied_loads_kernel(count, copies)
        simulation = single_launch(
            kernel, "copied", grid=(1, 1, 1), block=(32, 1, 1), params=(words,)
        )
        return predict(simulation, words).launches[0].cycles

    copy, use = "mov.b32 %c{i}, %v{i};", "add.u32 %c{i}, %v{i}, 1;"
    assert cycles(8, copy) - cycles(1, copy) < 0.5 * H200.global_latency
    assert cycles(8, use) - cycles(1, use) > 6.5 * H200.global_latency


def test_a_wave_more_takes_a_wave_longer():
    source = torch.zeros(25 * 8192, dtype=torch.uint8)
    one, two = (load(ctas, 25, 8192, source) for ctas in (132, 133))
    assert (one.waves, two.waves) == (1, 2)
    assert two.cycles > one.cycles + H200.cta_start


def test_a_last_wave_of_short_ctas_is_short():
    """CTAs that get the work left over by whole rounds: what was recorded of the full wave says
    nothing of them, neither how long they take nor what they load."""
    busy, quick = (_load_trace(copies).clusters[0] for copies in (25, 1))
    recorded = [replace(busy, number=0), replace(busy, number=66), replace(quick, number=231)]
    base = _load_trace(25)
    trace, full = (
        replace(base, clusters=clusters, config=replace(base.config, grid=(ctas, 1, 1)))
        for clusters, ctas in ((recorded, 232), (recorded[:2], 132))
    )
    assert trace.loaded(132) == 132 * busy.loaded + 100 * quick.loaded
    launch, first = (predict_launch(each, H200) for each in (trace, full))
    assert first.cycles < launch.cycles < 1.5 * first.cycles


def tensor_load(mode: str, box: tuple[int, int], copies: int) -> LaunchPrediction:
    """Model boxes of 4 rows of 32 bytes, as one tile each or gathered."""
    source = torch.zeros((8, 32), dtype=torch.uint8)
    words = [source.data_ptr(), 1 << 4 | 2 << 32, 0, 0, 31 | 7 << 32, 0, (box[0] - 1) << 56,
             box[1] - 1, *[0] * 8]  # fmt: skip
    simulation = single_launch(
        tensor_load_kernel(copies, mode, 128),
        "load",
        grid=(1, 1, 1),
        block=(32, 1, 1),
        shared=2048,
        params=(struct.pack("<16Q", *words),),
    )
    return predict(simulation, buffers=(source,)).launches[0]


def test_gathered_rows_are_requests_of_their_own():
    tiles, rows = tensor_load("tile", (32, 4), 64), tensor_load("tile::gather4", (32, 1), 64)
    assert tiles.busy["TMA issue"] == 64 * B200.copy_issue
    assert rows.busy["TMA issue"] == 4 * 64 * B200.copy_issue
    assert rows.busy["memory"] == tiles.busy["memory"]
    assert rows.cycles - tiles.cycles == pytest.approx(3 * 64 * B200.copy_issue, rel=0.1)


def test_the_table_says_how_much_is_assumed(capsys, monkeypatch):
    monkeypatch.setattr(sim_table, "model_subjects", lambda arch: [])
    sim_table.print_table("sm_100a", None)
    first = capsys.readouterr().out.splitlines()[0]
    numbers = [f.name for f in fields(Machine) if f.type in ("float", "int")]
    assert f"{len(ASSUMED['B200'])} of its {len(numbers)} figures are assumptions" in first


def test_assumptions_can_be_adjusted():
    source = torch.zeros(8192, dtype=torch.uint8)
    far = replace(H200, memory_latency=H200.memory_latency + 500)
    assert load(1, 1, 8192, source, far).cycles == pytest.approx(
        load(1, 1, 8192, source).cycles + 500, abs=1
    )


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda m: m.name)
def test_assumptions_are_fields(machine):
    assert all(hasattr(machine, name) for name in ASSUMED[machine.name])
    assert B200.multiprocessors == 148
