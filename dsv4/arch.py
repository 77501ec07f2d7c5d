"""GPU architectures that kernels are compiled for, and what a CTA and an SM of each may use.

Facts of hardware alone: imports neither torch nor cutlass, so that kernels, operators, benchmarks
and commands read one table.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.quoting import quoted

KIB = 1024


@dataclass(frozen=True)
class Arch:
    """One architecture.

    Attributes:
        name: as the kernel compiler calls it.
        capability: compute capability of its devices.
        products: whose kernels these are, for help texts and messages.
        num_sms: SMs of the usual product; a device says its own number.
        smem_per_cta: bytes of dynamic shared memory that one CTA can have.
        smem_per_sm: bytes of shared memory of an SM.
        registers_per_sm: 32-bit registers of an SM.
        tmem_columns: columns of tensor memory, of 128 lanes of 32 bits; 0 without tensor memory.
        features: instruction families that kernels choose by.
    """

    name: str
    capability: tuple[int, int]
    products: str
    num_sms: int
    tmem_columns: int
    features: frozenset[str]
    smem_per_cta: int = 227 * KIB
    smem_per_sm: int = 228 * KIB
    registers_per_sm: int = 64 * KIB


# "tcgen05.int8" is absent from sm_103a: its tensor cores have no integer products.
_BLACKWELL = frozenset({"tcgen05", "tcgen05.int8", "tma", "clusters", "pdl"})
SM_90A = Arch("sm_90a", (9, 0), "H100/H200", 132, 0, frozenset({"wgmma", "tma", "clusters", "pdl"}))
SM_100A = Arch("sm_100a", (10, 0), "B200/GB200", 148, 512, _BLACKWELL)
SM_103A = Arch("sm_103a", (10, 3), "B300/GB300", 148, 512, _BLACKWELL - {"tcgen05.int8"})

ARCHS = {arch.name: arch for arch in (SM_90A, SM_100A, SM_103A)}
_BY_CAPABILITY = {arch.capability: arch for arch in ARCHS.values()}


def of_name(name: str) -> Arch:
    """Architecture `name`; ValueError lists the known ones."""
    if name not in ARCHS:
        raise ValueError(f"arch: got {quoted(name)}, needs one of {', '.join(ARCHS)}")
    return ARCHS[name]


def of_capability(capability: tuple[int, int]) -> Arch | None:
    """Architecture of devices of a compute capability; None where there are no kernels for it."""
    return _BY_CAPABILITY.get(tuple(capability))
