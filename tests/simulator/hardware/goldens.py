"""What hardware wrote: a digest and the first bytes of each row, all bytes of approximate rows.

goldens.json names the machine, the date and each program's identity; goldens.npz holds the bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.simulator.hardware.case import Case, Row, TensorMap, Tolerance

FOLDER = Path(__file__).parent
HEAD = 16
_WORDS = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
_INFINITY = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF << 52}


@dataclass(frozen=True)
class Golden:
    """The hardware's output of one case.

    Args:
        digests, heads: per row, uint64 and the first bytes.
        values: per approximate row, by name, its bytes.
        maps: per tensor-map parameter, the 128 bytes the driver made, with address 0.
    """

    identity: str
    digests: np.ndarray
    heads: np.ndarray
    values: dict[str, np.ndarray]
    maps: list[bytes]


def rows_of(case: Case, image: np.ndarray) -> Iterator[tuple[Row, np.ndarray]]:
    """Each row with its bytes."""
    offset = 0
    for row in case.rows:
        yield row, image[offset : offset + row.size]
        offset += row.size


def normalised(row: Row, data: np.ndarray) -> np.ndarray:
    """The row's bytes, every NaN of a floating-point row made the same."""
    if row.floats is None:
        return data
    words = np.ascontiguousarray(data).view(_WORDS[row.floats])
    sign = words.dtype.type(1 << (8 * words.itemsize - 1))
    magnitude = words & ~sign
    nan = magnitude > words.dtype.type(_INFINITY[row.floats])
    return np.where(nan, ~sign, words).view(np.uint8)


def _digest(data: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(data.tobytes(), digest_size=8).digest(), "little")


def _head(data: np.ndarray) -> np.ndarray:
    out = np.zeros(HEAD, np.uint8)
    out[: min(HEAD, len(data))] = data[:HEAD]
    return out


def golden_of(case: Case, image: np.ndarray, maps: list[bytes]) -> Golden:
    """Condense an output image."""
    rows = [(row, normalised(row, data)) for row, data in rows_of(case, image)]
    return Golden(
        case.identity(),
        np.array([_digest(data) for _, data in rows], np.uint64),
        np.stack([_head(data) for _, data in rows]),
        {row.name: data.copy() for row, data in rows if row.tolerance},
        maps,
    )


def differences(case: Case, golden: Golden, image: np.ndarray) -> list[str]:
    """One line per row in which `image` is not what the hardware wrote."""
    out = []
    for k, (row, raw) in enumerate(rows_of(case, image)):
        data = normalised(row, raw)
        if row.tolerance:
            worst = outside(row.floats, row.tolerance, golden.values[row.name], data)
            if worst:
                out.append(f"{row.name}: {worst}")
        elif _digest(data) != int(golden.digests[k]):
            want, got = bytes(golden.heads[k]).hex(" ", 4), bytes(_head(data)).hex(" ", 4)
            out.append(f"{row.name}: starts {got}, on hardware {want}")
    return out


def outside(kind: str, tolerance: Tolerance, want: np.ndarray, got: np.ndarray) -> str:
    """What is outside the tolerance between two arrays of bytes of a format, or nothing."""
    a, b = (_doubles(kind, x) for x in (want, got))
    allowed = np.maximum(tolerance.ulp * _spacing(kind, a), tolerance.absolute)
    with np.errstate(invalid="ignore"):
        # Sign of zero, infinities and NaN count as values of their own.
        same = (a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))
        close = np.isfinite(a) & np.isfinite(b) & (np.abs(a - b) <= allowed)
    bad = np.flatnonzero(~(same | close))
    if not len(bad):
        return ""
    i = int(bad[0])
    return f"{len(bad)} of {len(a)} outside, first at {i}: {b[i]!r}, on hardware {a[i]!r}"


def _doubles(kind: str, data: np.ndarray) -> np.ndarray:
    words = np.ascontiguousarray(data).view(_WORDS[kind])
    if kind == "bf16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return words.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]).astype(
        np.float64
    )


def _spacing(kind: str, values: np.ndarray) -> np.ndarray:
    """Distance between neighbours of the format at each magnitude."""
    digits, lowest = {"f16": (11, -14), "bf16": (8, -126), "f32": (24, -126)}[kind]
    exponent = np.frexp(np.where(np.isfinite(values), values, 0))[1] - 1
    return 2.0 ** (np.maximum(exponent, lowest) - digits + 1)


def map_parameters(case: Case) -> list[TensorMap]:
    """The tensor maps among a case's parameters."""
    return [p for p in case.params if isinstance(p, TensorMap)]


def save(
    folder: Path, machine: dict[str, str], encodings: dict[str, int | str], cases: dict[str, Golden]
) -> None:
    """Write goldens.json and goldens.npz; `encodings` is what encodings.outcomes gives."""
    listed = {name: {"identity": g.identity, "rows": len(g.digests)} for name, g in cases.items()}
    text = json.dumps({"machine": machine, "encodings": encodings, "cases": listed}, indent=1)
    (folder / "goldens.json").write_text(text + "\n")
    empty = np.zeros(0, np.uint8)
    values = [v for g in cases.values() for v in g.values.values()]
    maps = [np.frombuffer(m, np.uint8) for g in cases.values() for m in g.maps]
    np.savez_compressed(
        folder / "goldens.npz",
        digests=np.concatenate([g.digests for g in cases.values()]),
        heads=np.concatenate([g.heads for g in cases.values()]),
        values=np.concatenate([*values, empty]),
        maps=np.concatenate([*maps, empty]),
    )


class Goldens:
    """The committed results."""

    def __init__(self, folder: Path = FOLDER):
        listed = json.loads((folder / "goldens.json").read_text())
        self.machine: dict[str, str] = listed["machine"]
        self.encodings: dict[str, int | str] = listed["encodings"]
        self._listed: dict[str, dict] = listed["cases"]
        with np.load(folder / "goldens.npz") as stored:
            self._stored = dict(stored)
        self._starts: dict[str, int] = {}
        start = 0
        for name, entry in self._listed.items():
            self._starts[name] = start
            start += entry["rows"]

    def __contains__(self, name: str) -> bool:
        return name in self._listed

    def names(self) -> list[str]:
        """Names of all recorded cases, in the order they were recorded."""
        return list(self._listed)

    def read(self, cases: list[Case]) -> dict[str, Golden]:
        """The goldens of all recorded cases, which must be given in recorded order."""
        out, value_at, map_at = {}, 0, 0
        for case in cases:
            rows = slice(self._starts[case.name], self._starts[case.name] + len(case.rows))
            values = {}
            for row in case.rows:
                if row.tolerance:
                    values[row.name] = self._stored["values"][value_at : value_at + row.size]
                    value_at += row.size
            maps = []
            for _ in map_parameters(case):
                maps.append(self._stored["maps"][map_at : map_at + 128].tobytes())
                map_at += 128
            out[case.name] = Golden(
                self._listed[case.name]["identity"],
                self._stored["digests"][rows],
                self._stored["heads"][rows],
                values,
                maps,
            )
        return out
