"""The page of findings, coverage and timeline."""

import re

import pytest
import torch

from dsv4.simulator import simulate_ptx
from dsv4.simulator.html import Modelled, as_html
from dsv4.simulator.merged import MergedReport
from dsv4.simulator.timing.engine import Span
from dsv4.simulator.timing.machine import MACHINES
from dsv4.simulator.timing.prediction import LaunchPrediction

pytestmark = pytest.mark.stage("simulator")

# Lines 2 to 4 of the source: a store of each thread to one word, a barrier that nothing reaches.
TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.file 1 "{source}"
.visible .entry k(.param .b64 out)
{{
.reg .pred %p; .reg .b32 %r<4>; .reg .b64 %d<4>; .shared .align 4 .b8 word[4];
.loc 1 2 0
ld.param.b64 %d1, [out];
mov.u32 %r1, %tid.x;
setp.gt.u32 %p, %r1, 1000;
.loc 1 3 0
st.shared.b32 [word], %r1;
@!%p bra DONE;
.loc 1 4 0
bar.sync 0;
DONE:
st.global.b32 [%d1], 1;
ret;
}}
"""


@pytest.fixture
def report(tmp_path) -> MergedReport:
    source = tmp_path / "kernel <1>.cu"
    source.write_text("// first\nread();\nword = tid;\nif (a < b) sync();\n")
    merged = MergedReport()
    out = torch.zeros(1, dtype=torch.int32)
    merged.add(
        simulate_ptx(TEXT.format(source=source), "k", grid=1, block=64, params=(out,))
    )  # fmt: skip
    return merged


def _cells(page: str, line: int) -> list[str]:
    """Number, warp instructions, synchronisation and code of a source line."""
    row = next(r for r in re.findall(r"<tr id=.*?</tr>", page) if f'"n">{line}</td>' in r)
    return [re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?</td>", row)]


def test_lines_have_what_ran_and_what_was_found(report):
    page = as_html(report)
    assert _cells(page, 1) == ["1", "", "", "// first"]
    assert _cells(page, 2) == ["2", "6", "", "read();"]
    assert _cells(page, 4)[2:] == ["0/1", "if (a &lt; b) sync();"]
    assert report.findings[0].kind == "write-write race"
    behind = page[page.index("word = tid;") :]
    assert "write-write race" in behind[: behind.index("sync();")]
    assert "kernel &lt;1&gt;.cu" in page and "kernel <1>.cu" not in page
    assert '<span class="warn">1 synchronisation never reached' in page


def test_the_page_needs_nothing_else(report):
    page = as_html(report)
    assert not re.search(r"(src|href)=[\"'](?!#)", page) and "<script" not in page
    anchors = set(re.findall(r'href="#([^"]*)"', page))
    assert anchors and anchors <= set(re.findall(r'id="([^"]*)"', page))


def test_a_modelled_launch_is_drawn(report):
    machine = MACHINES["sm_90a"]
    spans = [
        Span("SM 0 TMA", "copy", 0.0, 500.0, 0),
        Span("SM 0 CTA 0 warp 1", "wait", 100.0, 900.0, 0),
    ]
    launch = LaunchPrediction("k", 1, 1, 900.0, 3.5, {"tensor pipe": 1.0}, {}, spans)
    page = as_html(report, [Modelled(machine, launch)])
    assert page.count("<rect ") == 2 and "SM 0 CTA 0 warp 1" in page and "3.5 µs" in page
    assert f"{machine.assumed}; first wave" in page and "figures are assumptions" in machine.assumed
    assert as_html(report).count("<rect ") == 0
