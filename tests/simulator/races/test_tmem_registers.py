"""tcgen05.ld and its wait: copies of the registers may come between, uses may not."""

import pytest

from tests.simulator.helpers.ptx import run_body

pytestmark = pytest.mark.stage("simulator")

WAIT = "tcgen05.wait::ld.sync.aligned;"
RACE = ["tcgen05.ld without wait"]


def _kinds(before: str, after: str = "", *, wait: str = WAIT, schedule: str = "eager") -> list[str]:
    """One warp stores and loads two columns; code before and after the wait."""
    report = run_body(
        f"""
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
        bar.warp.sync -1;
        ld.shared.b32 %r8, [%r2];
        tcgen05.st.sync.aligned.32x32b.x2.b32 [%r8], {{%r1, %r1}};
        tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r9, %r10}}, [%r8];
        {before}
        {wait}
        {after}
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;
        """,
        threads=32, target="sm_100a", schedule=schedule,
    )  # fmt: skip
    assert not report.warnings
    return sorted({f.kind for f in report.races})


USES = {
    "arithmetic": "add.u32 %r11, %r9, 1;",
    "a store": "st.global.b32 [%d2], %r10;",
    "an address": "and.b32 %r11, %r9, 0; add.u32 %r12, %r2, %r11; ld.shared.b32 %r13, [%r12];",
    "a packed pair": "mov.b64 %d5, {%r9, %r10}; add.u64 %d6, %d5, 1;",
    "an unpacked pair": "mov.b64 %d5, {%r9, %r10}; mov.b64 {%r12, %r13}, %d5; not.b32 %r14, %r13;",
    "a copy of a copy": "mov.b32 %r11, %r9; mov.b32 %r12, %r11; setp.eq.u32 %p5, %r12, 0;",
    "a store to TMEM": "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8+2], {%r9};\n"
                       "tcgen05.wait::st.sync.aligned;",
    "a guarded use": "setp.eq.u32 %p5, %r1, %r1;\n@%p5 add.u32 %r11, %r9, 1;",
    "another block": "bra NEXT;\nNEXT: add.u32 %r11, %r9, 1;",
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_comes_after_the_wait(use, schedule):
    assert _kinds(use, schedule=schedule) == RACE
    assert _kinds("", use, schedule=schedule) == []


@pytest.mark.parametrize(
    "copies",
    [
        "mov.b64 %d5, {%r9, %r10};",
        "mov.b32 %r11, %r9;\nmov.b32 %r12, %r11;",
        "mov.b64 %d5, {%r9, %r10};\nmov.b64 {%r12, %r13}, %d5;",
        # What was copied is overwritten before it is used.
        "mov.b32 %r11, %r9;\nmov.u32 %r11, 5;\nadd.u32 %r12, %r11, 1;",
    ],
)
def test_copies_may_come_before_the_wait(copies):
    body = f"mov.u32 %r11, 0;\n{copies}"
    assert _kinds(body, "add.u32 %r14, %r11, 1;") == []


def test_a_value_of_the_loop_before_may_be_used():
    """The copy is of the load before, which has been waited for."""
    loop = f"""
    {WAIT}
    mov.b32 %r11, %r9;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r9, %r10}}, [%r8];
    add.u32 %r12, %r11, 1;
    """
    assert _kinds(loop) == []


def test_a_wait_that_is_missing_altogether():
    found = _kinds("", "add.u32 %r11, %r9, 1;", wait="")
    assert found == RACE  # that the dealloc may overtake the load has the same cause
