"""The simulator writes what an H200 wrote, program by program.

`scripts/tools/simulator_goldens.py` records the hardware's side; see goldens.json for the machine.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dsv4.simulator import KernelFault
from dsv4.simulator.frontend.stub_library import stub_library
from tests.simulator.hardware import tma
from tests.simulator.hardware.case import Case, TensorMap
from tests.simulator.hardware.encodings import Encoding, outcomes
from tests.simulator.hardware.families import FAMILIES
from tests.simulator.hardware.goldens import Goldens, differences, map_parameters, rows_of
from tests.simulator.hardware.replay import replay, simulated
from tests.simulator.hardware.tensor_maps import ELEMENTS, SWIZZLES, encode, slice_bytes

pytestmark = pytest.mark.stage("simulator")

CASES = {case.name: case for make in FAMILIES.values() for case in make()}
GOLDENS = Goldens()
RECORDED = GOLDENS.read(list(CASES.values()))
MAP_CASES = [case for case in CASES.values() if map_parameters(case)]
# Every third of the many wgmma programs runs by default, and all of everything else.
_SLOW = {c.name for i, c in enumerate(FAMILIES["wgmma"]()) if i % 3}
_ASYNCHRONOUS = [c.name for family in ("bulk", "clusters", "tma") for c in FAMILIES[family]()]
# Its 768 asynchronous stores, performed one per poll, outlast the program's bounded wait.
_ASYNCHRONOUS.remove("st.async")


def _marked(names: list[str], slow: set[str]) -> list:
    return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names]


def _check(case: Case, image: np.ndarray) -> None:
    found = differences(case, RECORDED[case.name], image)
    assert not found, "\n".join([f"{case.name}: {len(found)} rows differ", *found[:10]])


@pytest.mark.parametrize("name", _marked(list(CASES), _SLOW))
def test_replay_gives_the_hardwares_memory(name):
    _check(CASES[name], replay(CASES[name]))


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize("name", _marked(_ASYNCHRONOUS, set(_ASYNCHRONOUS[25:])))
def test_asynchronous_programs_do_not_depend_on_the_schedule(name, schedule, seed):
    _check(CASES[name], replay(CASES[name], schedule, seed))


_CHECKED = ["ldmatrix", "stmatrix", "red shared", "red global", "atom shared", "cp.async"]
_CHECKED += _ASYNCHRONOUS
# As recorded it stores to other CTAs before anything says that they have started.
UNGATHERED = "remote generic access"
_CHECKED.remove(UNGATHERED)


@pytest.mark.parametrize("name", _marked(_CHECKED, set(_CHECKED[30:])))
def test_the_checker_finds_nothing_in_ordered_programs(name):
    _, report = simulated(CASES[name], races=True)
    assert not report.races, str(report)


def test_the_checker_finds_a_store_to_a_cta_that_may_not_have_started():
    _, report = simulated(CASES[UNGATHERED], races=True)
    assert {race.kind for race in report.races} == {"access to a CTA that may not have started"}


def test_the_checker_finds_that_overlapping_cells_need_a_barrier():
    case = CASES["atom shared"]
    unordered = Case(**{**vars(case), "ptx": case.ptx.replace("bar.sync 0;", "")})
    _, report = simulated(unordered, races=True)
    assert any("race" in str(finding) for finding in report.races)


def test_goldens_are_of_these_programs():
    assert GOLDENS.names() == list(CASES)
    stale = [n for n, case in CASES.items() if case.identity() != RECORDED[n].identity]
    assert not stale, f"of other programs: {stale}; run scripts/tools/simulator_goldens.py"


@pytest.mark.parametrize("name", ["float32", "ldmatrix", "approximate", "bulk reduce"])
def test_a_wrong_bit_is_found_in_every_row(name):
    case = CASES[name]
    image = replay(case)
    for k, (row, data) in enumerate(rows_of(case, image)):
        # The highest byte: for approximate rows a change of exponent or sign.
        data[-1] ^= 0x40
        found = differences(case, RECORDED[name], image)
        assert len(found) == 1 and found[0].startswith(f"{row.name}: "), (k, row.name, found)
        data[-1] ^= 0x40


@pytest.mark.parametrize("case", MAP_CASES, ids=lambda c: c.name)
def test_tensor_maps_are_those_of_the_driver(case):
    for spec, made in zip(map_parameters(case), RECORDED[case.name].maps):
        assert encode(spec, 0) == made
        assert _stub_map(spec)[8:] == made[8:]


def _stub_encode(call: Encoding) -> list[int] | None:
    """The map that compiled host code gets from the simulated runtime of an H200."""
    stub = ctypes.CDLL(stub_library())
    stub.dsv4sim_configure(None, 132, 9, 232448)
    out = (ctypes.c_uint64 * 16)()
    status = stub.dsv4sim_cuTensorMapEncodeTiled(
        out, call.dtype, call.rank, ctypes.c_void_p(call.address),
        (ctypes.c_uint64 * 5)(*call.dims), (ctypes.c_uint64 * 5)(*call.strides),
        (ctypes.c_uint32 * 5)(*call.box), (ctypes.c_uint32 * 5)(*call.steps),
        call.interleave, call.swizzle, call.promotion, call.fill,
    )  # fmt: skip
    return None if status else list(out)


def _stub_map(spec: TensorMap) -> bytes:
    words = _stub_encode(
        Encoding(
            ELEMENTS[spec.dtype][1], len(spec.dims), 0x10000, spec.dims, spec.strides, spec.box,
            spec.element_strides(), slice_bytes(spec) // 16, SWIZZLES[spec.swizzle], 0,
            int(spec.nan_fill),
        )
    )  # fmt: skip
    return np.array(words, "<u8").tobytes()


def test_the_driver_and_the_simulator_accept_the_same_tensor_maps():
    assert outcomes(_stub_encode) == GOLDENS.encodings


_SPEC = TensorMap(3, "bf16", (64, 16), (128,), (32, 8))


@pytest.mark.parametrize(
    ("make", "origin", "message"),
    [
        (tma.load, (4, 0), "multiple of 8 elements"),
        (tma.store, (4, 0), "multiple of 8 elements"),
        (tma.store, (0, -1), "negative coordinates only load"),
        (tma.store, (-8, 0), "negative coordinates only load"),
    ],
)
def test_coordinates_that_hardware_refuses(make, origin, message):
    case = make(_SPEC)
    coordinates = case.buffers[2].copy()
    coordinates[:2] = origin
    refused = Case(**{**vars(case), "buffers": (*case.buffers[:2], coordinates, *case.buffers[3:])})
    with pytest.raises(KernelFault, match=message):
        replay(refused)
