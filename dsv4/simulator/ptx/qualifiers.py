"""Memory order of an instruction: its semantics and scope, as PTX defines them or defaults to."""

from __future__ import annotations

import re
from enum import IntEnum
from functools import cache
from typing import NamedTuple


class Scope(IntEnum):
    """Threads that an operation synchronises with; also how far two threads are apart."""

    CTA = 0
    CLUSTER = 1
    GPU = 2
    SYS = 3


class Order(NamedTuple):
    """Effect of an instruction on the order of memory accesses.

    Args:
        strong: a synchronising access, or a fence between threads.
        scope: of a strong operation.
        restricted: a fence that concerns mbarriers alone (`.sync_restrict`).
    """

    strong: bool = False
    releases: bool = False
    acquires: bool = False
    scope: Scope = Scope.SYS
    restricted: bool = False


WEAK = Order()
_SEMANTICS = ("relaxed", "acquire", "release", "acq_rel", "sc", "volatile", "mmio")
_RELEASES, _ACQUIRES = ("release", "acq_rel", "sc"), ("acquire", "acq_rel", "sc")
_SCOPES = {scope.name.lower(): scope for scope in Scope} | {"gl": Scope.GPU}
_ARRIVALS, _WAITS = ("arrive", "arrive_drop"), ("test_wait", "try_wait")

# Operation -> the semantics that PTX lets it name without a scope, and with one; "" is none.
_PLAIN = (("",), ())
_BY_ARRIVALS, _BY_WAITS = (("", "release", "relaxed"),) * 2, (("", "acquire", "relaxed"),) * 2
_BY_BYTES = (("", "relaxed"),) * 2
_NAMED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ld": (("", "weak", "volatile"), ("relaxed", "acquire", "mmio relaxed")),
    "st": (("", "weak", "volatile"), ("relaxed", "release", "mmio relaxed")),
    "atom": (("", "relaxed", "acquire", "release", "acq_rel"),) * 2,
    "red": (("", "relaxed", "release"),) * 2,
    "membar": ((), ("",)),
    "mbarrier": _PLAIN, "bar": _PLAIN, "barrier": _PLAIN, "bar.cta": _PLAIN, "barrier.cta": _PLAIN,
    **{f"mbarrier.{name}": _BY_ARRIVALS for name in _ARRIVALS},
    **{f"mbarrier.{name}": _BY_WAITS for name in _WAITS},
    "mbarrier.expect_tx": _BY_BYTES, "mbarrier.complete_tx": _BY_BYTES,
    "barrier.cluster.arrive": (("", "release", "relaxed"), ()),
    "barrier.cluster.wait": (("", "acquire"), ()),
}  # fmt: skip
_SCOPE = r"\.(cta|cluster|gpu|sys)"
_FENCES = re.compile(
    rf"fence(\.(sc|acq_rel|acquire|release))?{_SCOPE}"
    r"|fence\.mbarrier_init\.release\.cluster"
    r"|fence\.proxy\.(alias|async(\.(global|shared::cta|shared::cluster))?)"
    rf"|fence\.proxy\.tensormap::generic\.(acquire|release){_SCOPE}"
    r"|fence(\.proxy\.async::generic)?\.acquire\.sync_restrict::shared::cluster\.cluster"
    r"|fence(\.proxy\.async::generic)?\.release\.sync_restrict::shared::cta\.cluster"
)


@cache
def is_defined(parts: tuple[str, ...]) -> bool:
    """Whether PTX has an opcode with these semantics and scopes: it may name one of each, of those
    that mean something to the operation."""
    if parts[0] == "fence":
        return _FENCES.fullmatch(".".join(parts)) is not None
    length = next((n for n in (3, 2, 1) if ".".join(parts[:n]) in _NAMED), 0)
    if not length:
        return True
    scopes = [part for part in parts[length:] if part in _SCOPES]
    semantics = " ".join(part for part in parts[length:] if part == "weak" or part in _SEMANTICS)
    return len(scopes) < 2 and semantics in _NAMED[".".join(parts[:length])][len(scopes)]


@cache
def order_of(parts: tuple[str, ...]) -> Order:
    """The memory order of an opcode, given its dotted parts.

    An mbarrier operation without a scope counts as of the cluster, although PTX defaults to the
    CTA: NVIDIA's own pipelines arrive at other CTAs' barriers like that, and its hardware runs them
    so.
    """
    stem = parts[0]
    if stem in ("ld", "st"):
        return _ordered(parts, "weak", Scope.SYS)
    if stem in ("atom", "red"):
        return _ordered(parts, "relaxed", Scope.GPU)
    if stem == "membar":
        return _ordered((*parts, "sc"), "sc", Scope.SYS)
    if stem == "fence":
        return _fence(parts)
    if stem == "mbarrier" and parts[1:2] and parts[1] not in ("init", "inval", "pending_count"):
        semantics = "release" if parts[1] in _ARRIVALS else "relaxed"
        if parts[1] in _WAITS:
            semantics = "acquire"
        return _ordered(parts, semantics, Scope.CLUSTER)
    if parts[:2] == ("barrier", "cluster"):
        semantics = "release" if parts[2:3] == ("arrive",) else "acquire"
        return _ordered(parts, semantics, Scope.CLUSTER)
    return WEAK


def _fence(parts: tuple[str, ...]) -> Order:
    restricted = any(part.startswith("sync_restrict") for part in parts)
    if parts[1:2] in (("proxy",), ("mbarrier_init",)) and not restricted:
        return WEAK
    return _ordered(parts, "acq_rel", Scope.SYS)._replace(restricted=restricted)


def _ordered(parts: tuple[str, ...], semantics: str, scope: Scope) -> Order:
    """An order with the given defaults."""
    found = [part for part in parts[1:] if part in _SEMANTICS]
    if found:
        semantics = found[0]
    scope = next((_SCOPES[part] for part in parts[1:] if part in _SCOPES), scope)
    if semantics == "weak":
        return WEAK
    if semantics in ("volatile", "mmio"):
        scope = Scope.SYS
    return Order(True, semantics in _RELEASES, semantics in _ACQUIRES, scope)
