#!/usr/bin/env python3
"""Runs the simulator's hardware programs on a Hopper GPU and records what they wrote.

    scripts/tools/simulator_goldens.py [--output tests/simulator/hardware] [--images images.npz]

Each family runs in its own process, restarted after a program that kills its CUDA context. Programs
that fail are listed at the end (exit status 1) and are not recorded. `--images` also keeps the
whole output images, to look at a mismatch with.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import datetime
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.simulator.hardware.case import Buffer, Case, TensorMap  # noqa: E402
from tests.simulator.hardware.encodings import Encoding, outcomes  # noqa: E402
from tests.simulator.hardware.families import FAMILIES  # noqa: E402
from tests.simulator.hardware.goldens import FOLDER, Golden, golden_of, save  # noqa: E402
from tests.simulator.hardware.tensor_maps import ELEMENTS, SWIZZLES, slice_bytes  # noqa: E402

SECONDS_PER_FAMILY = 120
LOST_CONTEXTS = 6  # per family, before its remaining programs are given up


def _call(function, *arguments):
    """Call the driver; its result, or RuntimeError with the error's name."""
    error, *values = function(*arguments)
    if int(error):
        raise RuntimeError(f"{function.__name__}: {error.name}")
    return values[0] if values else None


class Gpu:
    """Device 0, its loaded modules, and launches of cases."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        _call(driver.cuInit, 0)
        self.device = _call(driver.cuDeviceGet, 0)
        _call(driver.cuCtxSetCurrent, _call(driver.cuDevicePrimaryCtxRetain, self.device))
        self.functions: dict[str, object] = {}

    def machine(self) -> dict[str, str]:
        """What the results were recorded on."""
        name = _call(self.driver.cuDeviceGetName, 100, self.device)
        version = _call(self.driver.cuDriverGetVersion)
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
        return {
            "gpu": name.split(b"\0")[0].decode(),
            "driver": listed.stdout.split()[0],
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
            "date": datetime.date.today().isoformat(),
        }

    def run(self, case: Case) -> tuple[np.ndarray, list[bytes]]:
        """The output image of a case and the tensor maps the driver made, with address 0."""
        driver = self.driver
        pointers = [self._upload(buffer) for buffer in case.buffers]
        values, maps = [], []
        for p in case.params:
            if isinstance(p, Buffer):
                values.append(ctypes.c_uint64(int(pointers[p.index]) + p.offset))
            elif isinstance(p, TensorMap):
                raw = self._tensor_map(p, int(pointers[p.buffer]))
                maps.append(bytes(8) + raw[8:])
                values.append((ctypes.c_uint8 * 128).from_buffer_copy(raw))
            else:
                values.append(ctypes.c_uint64(p))
        array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self._launch(case, ctypes.addressof(array))
        _call(driver.cuCtxSynchronize)
        image = np.empty(case.buffers[0].nbytes, np.uint8)
        _call(driver.cuMemcpyDtoH, image.ctypes.data, pointers[0], image.nbytes)
        for pointer in pointers:
            _call(driver.cuMemFree, pointer)
        return image, maps

    def _upload(self, data: np.ndarray):
        data = np.ascontiguousarray(data)
        pointer = _call(self.driver.cuMemAlloc, data.nbytes)
        _call(self.driver.cuMemcpyHtoD, pointer, data.ctypes.data, data.nbytes)
        return pointer

    def _function(self, case: Case):
        if case.ptx not in self.functions:
            module = _call(self.driver.cuModuleLoadData, case.ptx.encode() + b"\0")
            self.functions[case.ptx] = _call(self.driver.cuModuleGetFunction, module, b"kernel")
        return self.functions[case.ptx]

    def _launch(self, case: Case, params: int) -> None:
        driver = self.driver
        function = self._function(case)
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver.cuFuncSetAttribute, function, limit, case.shared)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = case.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = case.block, 1, 1
        config.sharedMemBytes = case.shared
        if case.cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = case.cluster
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            config.attrs, config.numAttrs = [attribute], 1
        _call(driver.cuLaunchKernelEx, config, function, params, 0)

    def encode(self, call: Encoding) -> list[int] | None:
        """The words of a tensor map, None if the driver refuses its parameters."""
        driver = self.driver
        wide, narrow = driver.cuuint64_t, driver.cuuint32_t
        error, made = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType(call.dtype),
            call.rank,
            call.address,
            [wide(x) for x in call.dims],
            [wide(x) for x in call.strides],
            [narrow(x) for x in call.box],
            [narrow(x) for x in call.steps],
            driver.CUtensorMapInterleave(call.interleave),
            driver.CUtensorMapSwizzle(call.swizzle),
            driver.CUtensorMapL2promotion(call.promotion),
            driver.CUtensorMapFloatOOBfill(call.fill),
        )
        return None if int(error) else [int(word) for word in made.opaque]

    def _tensor_map(self, spec: TensorMap, address: int) -> bytes:
        driver = self.driver
        wide, narrow = driver.cuuint64_t, driver.cuuint32_t
        fill = driver.CUtensorMapFloatOOBfill
        made = _call(
            driver.cuTensorMapEncodeTiled,
            driver.CUtensorMapDataType(ELEMENTS[spec.dtype][1]),
            len(spec.dims),
            address,
            [wide(d) for d in spec.dims],
            [wide(s) for s in spec.strides or (16,)],
            [narrow(b) for b in spec.box],
            [narrow(s) for s in spec.element_strides()],
            driver.CUtensorMapInterleave(slice_bytes(spec) // 16),
            driver.CUtensorMapSwizzle(SWIZZLES[spec.swizzle]),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
            if spec.nan_fill
            else fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


def _worker(family: str, skip: int, path: Path) -> int:
    """Run a family's cases from number `skip` on; pickles results to `path`. 3: context lost."""
    gpu = Gpu()
    results: list[tuple[str, object]] = []
    status = 0
    for case in FAMILIES[family]()[skip:]:
        try:
            results.append((case.name, gpu.run(case)))
        except RuntimeError as error:
            results.append((case.name, str(error)))
            if "cuCtxSynchronize" in str(error):
                status = 3
                break
    with open(path, "wb") as file:
        pickle.dump((gpu.machine(), results), file)
    return status


def _run_family(family: str, folder: Path) -> tuple[dict[str, str], list[tuple[str, object]]]:
    """All results of a family, over as many processes as its failures need."""
    machine, results, status, processes = {}, [], 3, 0
    while status == 3 and processes < LOST_CONTEXTS:
        processes += 1
        path = folder / f"{family}-{len(results)}.pickle"
        command = [sys.executable, __file__, "--worker", family, str(len(results)), str(path)]
        status = subprocess.run(command, timeout=SECONDS_PER_FAMILY, check=False).returncode
        if status not in (0, 3):
            raise RuntimeError(f"family {family}: worker ended with status {status}")
        with open(path, "rb") as file:
            machine, more = pickle.load(file)
        results += more
    return machine, results


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the golden files")
    parser.add_argument("--images", type=Path, help="also write the whole output images (npz)")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        family, skip, path = arguments.worker
        return _worker(family, int(skip), Path(path))
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(len(FAMILIES)) as pool,
    ):
        results = list(pool.map(lambda family: _run_family(family, Path(folder)), FAMILIES))
    goldens: dict[str, Golden] = {}
    images: dict[str, np.ndarray] = {}
    failed: list[str] = []
    for family, (_, found) in zip(FAMILIES, results):
        cases = FAMILIES[family]()
        failed += [f"{case.name}: not run" for case in cases[len(found) :]]
        for case, (name, outcome) in zip(cases, found):
            if isinstance(outcome, str):
                failed.append(f"{name}: {outcome}")
                continue
            images[name] = outcome[0]
            goldens[name] = golden_of(case, *outcome)
    arguments.output.mkdir(parents=True, exist_ok=True)
    machine = results[0][0]
    save(arguments.output, machine, outcomes(Gpu().encode), goldens)
    if arguments.images:
        np.savez_compressed(arguments.images, **images)
    print(f"{len(goldens)} programs recorded on {machine}")
    for line in failed:
        print(f"failed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
