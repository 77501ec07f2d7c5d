"""Registers that a wgmma still reads or writes must wait for its wgmma.wait_group."""

import numpy as np
import pytest
import torch

from tests.simulator.helpers.ptx import kinds, run_body

pytestmark = pytest.mark.stage("simulator")

IN_FLIGHT = "wgmma register in flight"
_SETUP = """
st.shared.b32 [%r4], %r1;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.eq.u32 %p8, %r1, %r1;
setp.ne.u32 %p9, %r1, %r1;
shr.u32 %r8, %r2, 4;
cvt.u64.u32 %d8, %r8;
wgmma.fence.sync.aligned;
"""
_FORM = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
_FROM_REGISTERS = (
    f"{_FORM} {{%r40, %r41, %r42, %r43}}, {{%r44, %r45, %r46, %r47}}, %d8, %p8, 1, 1, 0;"
)
_FROM_SHARED = f"{_FORM} {{%r40, %r41, %r42, %r43}}, %d8, %d8, %p8, 1, 1, 0, 0;"
_OTHER = f"{_FORM} {{%r50, %r51, %r52, %r53}}, {{%r54, %r55, %r56, %r57}}, %d8, %p8, 1, 1, 0;"
_COMMIT = "wgmma.commit_group.sync.aligned;"
_WAIT = "wgmma.wait_group.sync.aligned {};"
_LAST = _WAIT.format(0)
_FENCE = "wgmma.fence.sync.aligned;"
SCHEDULES = pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])


def _body(*lines: str) -> str:
    return _SETUP + "\n".join(lines)


def _kinds(*lines: str, schedule: str = "eager") -> list[str]:
    return kinds(_body(*lines), threads=128, schedule=schedule)


# Writes of one register of the fragment, by opcodes whose first operand is written.
WRITES = {
    "load": "ld.shared.b32 %r46, [%r4];",
    "vector": "ld.shared.v2.b32 {%r46, %r10}, [%r2];",
    "move": "mov.b32 %r46, %r1;",
    "guarded": "@%p8 add.u32 %r46, %r1, 1;",
    "of some lanes": "@%p2 add.u32 %r46, %r1, 1;",
    "product": f"{_FORM} {{%r46, %r51, %r52, %r53}}, %d8, %d8, %p8, 1, 1, 0, 0;\n{_COMMIT}",
}


@SCHEDULES
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_fragment_is_rewritten(write, schedule):
    product = (_FROM_REGISTERS, _COMMIT)
    assert _kinds(*product, write, _LAST, schedule=schedule) == [IN_FLIGHT]
    fenced = (_LAST, _FENCE, write, _LAST)
    assert _kinds(*product, *fenced, schedule=schedule) == []


USES = {
    "read": "add.f32 %r10, %r41, %r41;",
    "write": "mov.b32 %r41, 0;",
    "store": "st.global.b32 [%d2], %r41;",
    "product": f"{_FORM} {{%r50, %r51, %r52, %r53}}, {{%r40, %r41, %r42, %r43}}, %d8, %p8, 1, 1, 0;"
    f"\n{_COMMIT}",
}


@SCHEDULES
@pytest.mark.parametrize("product", [_FROM_REGISTERS, _FROM_SHARED], ids=["registers", "shared"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_accumulators_are_used(use, product, schedule):
    assert _kinds(product, _COMMIT, use, _LAST, schedule=schedule) == [IN_FLIGHT]
    assert _kinds(product, _COMMIT, _LAST, use, _LAST, schedule=schedule) == []


@SCHEDULES
def test_what_may_be_done_meanwhile(schedule):
    """Read the fragment, use it and the accumulators in another product, change nothing."""
    meanwhile = (
        "add.u32 %r10, %r46, 1;", "st.shared.b32 [%r4+1024], %r47;", _FENCE,
        _FROM_REGISTERS, "@%p9 mov.b32 %r46, 0;", "@%p9 mov.b32 %r41, 0;", _COMMIT,
    )  # fmt: skip
    assert _kinds(_FROM_REGISTERS, _COMMIT, *meanwhile, _LAST, schedule=schedule) == []


@SCHEDULES
def test_the_wait_must_be_for_the_product(schedule):
    first, second = "mov.b32 %r46, %r1;", "mov.b32 %r56, %r1;"
    products = (_FROM_REGISTERS, _COMMIT, _OTHER, _COMMIT, _WAIT.format(1))
    assert _kinds(*products, first, _LAST, schedule=schedule) == []
    assert _kinds(*products, second, _LAST, schedule=schedule) == [IN_FLIGHT]
    # The first product's sums may be used while the second is under way; that waits for nothing.
    use = "add.f32 %r10, %r41, %r41;"
    assert _kinds(*products, use, first, _LAST, schedule=schedule) == []
    assert _kinds(*products, use, second, _LAST, schedule=schedule) == [IN_FLIGHT]
    # A product that no group holds is not waited for.
    loose = (_FROM_REGISTERS, _LAST, first, _COMMIT, _LAST)
    assert _kinds(*loose, schedule=schedule) == [IN_FLIGHT]


@SCHEDULES
def test_a_sum_is_used_as_an_integer(schedule, seed):
    """One register of several; the others are only used as floating point numbers."""
    out = torch.zeros(256, dtype=torch.int32)
    ones = "mov.b32 %r{}, 0x3F803F80;"  # bfloat16, twice
    fill = ("st.shared.b32 [%r4], 0x3F803F80;", *(ones.format(r) for r in range(44, 48)))
    product = (_FENCE, _FROM_REGISTERS, _COMMIT, _LAST)
    body = _SETUP.replace("st.shared.b32 [%r4], %r1;", "\n".join(fill)) + "\n".join(
        ("mov.b32 %r41, 0x40000000;", *product, f"add.u32 %r10, %r41, {seed & 0xFF};",
         "st.global.b32 [%d2], %r10;")
    )  # fmt: skip
    run_body(body, threads=128, out=out, schedule=schedule).raise_if_racy()
    expected = np.array(18, np.float32).view(np.int32) + (seed & 0xFF)  # 2 + 16 ones
    assert (out[:128] == int(expected)).all()


@SCHEDULES
def test_sums_of_integers_and_of_floats_share_some_registers(schedule):
    """The register of both, first in either, is a float's; the others of the integers are not."""
    out = torch.zeros(256, dtype=torch.int32)
    ones = (f"mov.b32 %r{r}, 0x01010101;" for r in range(44, 48))
    integers = (
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r40, %r51, %r52, %r53}, "
        "{%r44, %r45, %r46, %r47}, %d8, %p9;"
    )
    body = _SETUP.replace("[%r4], %r1;", "[%r4], 0x01010101;") + "\n".join(
        (*ones, _FENCE, integers, _COMMIT, _LAST, "selp.b32 %r10, %r51, %r1, %p8;",
         "st.global.b32 [%d2], %r10;", _FENCE, _FROM_REGISTERS, _COMMIT, _LAST)
    )  # fmt: skip
    run_body(body, threads=128, out=out, schedule=schedule).raise_if_racy()
    assert (out[:128] == 32).all()


def test_both_places_are_named():
    body = _body(_FROM_REGISTERS, _COMMIT, WRITES["load"], USES["read"], _LAST)
    report = run_body(body, threads=128)
    assert [f.places[0].count("wgmma.mma_async") for f in report.races] == [1]
    (race,) = report.races
    assert "ld.shared.b32 %r46" in race.places[1] and "rewritten" in race.message


@SCHEDULES
def test_a_loop_that_loads_the_next_fragment(schedule):
    """The write comes before the product in the text, and after it in the next round."""
    loop = """
    mov.u32 %r9, 0;
    NEXT:
    {before}
    ld.shared.b32 %r46, [%r4];
    wgmma.fence.sync.aligned;
    {product}
    add.u32 %r9, %r9, 1;
    setp.lt.u32 %p4, %r9, 3;
    @%p4 bra NEXT;
    """
    product = f"{_FROM_REGISTERS}\n{_COMMIT}"
    for before, found in ((_LAST, []), ("", [IN_FLIGHT])):
        body = loop.format(before=before, product=product)
        assert _kinds(body, _LAST, schedule=schedule) == found
