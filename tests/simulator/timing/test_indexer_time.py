"""The model's time of `index_topk`, whose CTAs exchange queries and counts by st.async, against an
H200's measurements."""

from __future__ import annotations

import pytest

from dsv4.simulator.api import Simulation
from dsv4.simulator.timing import predict
from dsv4.testing.harness import Simulator
from dsv4.testing.index_topk import INDEX_TOPK, Case, Inputs
from dsv4.testing.kernel_call import OpKernels
from tests.simulator.timing.bounds import check_errors

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

# Tokens, entries that each sees -> us of all launches (docs/design/indexer.md).
MEASURED = {(1, 4096): 6.4, (4, 4096): 7.3, (16, 4096): 9.5, (1, 32768): 11.2}


def test_h200_every_measured_shape() -> None:
    kernels, errors = OpKernels(INDEX_TOPK, Simulator("sm_90a")), {}
    for (tokens, entries), measured in MEASURED.items():
        inputs = Inputs.make(Case((entries,) * tokens), 1)
        call = kernels.call(inputs)
        simulation = Simulation.of_compiled(kernels.compile(inputs.config))
        launches = predict(simulation, *call.args, **call.options, choose=range).launches
        found = sum(launch.microseconds for launch in launches)
        errors[f"{tokens} x {entries}"] = found / measured - 1
    check_errors(errors)
