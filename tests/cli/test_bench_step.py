"""`dsv4 bench step`: its random model, its floor and the way its inputs advance, on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4.bench import engine, prefill, timeline
from dsv4.bench import step as bench
from dsv4.bench.kernel_times import Span, own_times
from dsv4.bench.machine import Machine
from dsv4.bench.random_model import (
    check_reuse,
    fitting_sets,
    random_model,
    reuse_bytes,
    truncated,
)
from dsv4.bench.step_floor import Load, StepFloor
from dsv4.cli.main import main
from dsv4.config.layer_schedule import LayerKind
from dsv4.config.model_config import ModelConfig
from dsv4.engine.memory_plan import plan_memory

pytestmark = pytest.mark.stage("model")

TINY = Path(__file__).parents[2] / "checkpoints" / "tiny"


@pytest.fixture(scope="module")
def made():
    """The tiny checkpoint's shapes; two of its four layers have experts of their own."""
    config = truncated(ModelConfig.from_json(TINY), None, has_drafts=True)
    torch.manual_seed(0)
    return random_model(config, 2, torch.device("cpu"))


def test_weights_are_finite_and_late_layers_share_experts(made) -> None:
    layers = made.model.layers
    for name, parameter in made.model.named_parameters():
        assert parameter.float().isfinite().all(), name
    assert layers[2].ffn.experts is layers[0].ffn.experts
    assert layers[3].ffn.experts is layers[1].ffn.experts is not layers[0].ffn.experts
    assert layers[2].ffn.gate is not layers[0].ffn.gate
    assert made.aliased_layers == 2
    table = layers[0].ffn.gate.tid2eid
    assert all(len(set(row)) == table.shape[1] for row in table[:200].tolist())


@pytest.mark.parametrize("drafts", [0, 1])
def test_steps_advance_every_request_by_what_it_accepts(made, drafts: int) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        run = bench._Bench(made, bench.Shape("tiny", None, 3, 300, drafts, 0.8 * drafts))
        first = run.inputs.step.starts.clone()
        seen = {tuple(run.inputs.tokens.flatten().tolist())}
        for _ in range(5):
            run._step()
            seen.add(tuple(run.inputs.tokens.flatten().tolist()))
    # Four of five drafts in a row count as accepted.
    assert (run.inputs.step.starts - first).tolist() == [9 if drafts else 5] * 3
    assert len(seen) == 6
    assert 1 <= run._count_experts() <= 8


def test_keys_have_the_format_that_is_asked_for(made) -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.uint8)):
        run = bench._Bench(made, bench.Shape("tiny", None, 1, 300, kv_format=name))
        assert {layer.window.data.dtype for layer in run.cache.layers} == {dtype}
        with torch.no_grad():
            run._step()
    sizes = [
        bench._plans(ModelConfig.flash(), [bench.Shape("flash", None, 4, 32768, kv_format=name)])
        for name in ("bf16", "fp8", None)
    ]
    rows, entries, own = (plan.entries for (plan,) in sizes)
    # 1,024 bytes, and records of 584 whose pages end at multiples of 576.
    assert own == entries and 1.6 < rows / entries <= 1024 / 584


def test_contexts_shorter_than_the_steps_are_refused(made) -> None:
    for drafts, least in ((0, 29), (1, 57)):
        bench._Bench(made, bench.Shape("tiny", None, 1, least, drafts))
        with pytest.raises(ValueError, match=f"context: got {least - 1}, the .* at least {least}"):
            bench._Bench(made, bench.Shape("tiny", None, 1, least - 1, drafts))


def test_floors_of_flash_are_those_of_its_bytes() -> None:
    """At 4.4 TB/s and 800 TFLOP/s, by another count than this one: 2.56 ms and 12.5 ms a step."""
    config = truncated(ModelConfig.flash(), None, has_drafts=False)
    floor = StepFloor(config, Machine("H200", 4.4e12, 4.4e12, 8e14))
    one, sixteen = Load(1, 1, 32768, 6.0), Load(16, 1, 32768, 80.8)
    assert floor.step(one) == pytest.approx(2560, rel=0.01)
    assert floor.step(sixteen) == pytest.approx(12500, rel=0.01)
    kinds = {spec.kind: floor.layer(spec, one) for spec in config.schedule}
    assert kinds[LayerKind.CSA] == pytest.approx(56.6, rel=0.01)
    assert kinds[LayerKind.HCA] == pytest.approx(51.4, rel=0.01)


def test_what_fits_is_counted_and_what_does_not_is_refused_with_its_size() -> None:
    config = truncated(ModelConfig.flash(), None, has_drafts=False)
    plan = plan_memory(config, 32768, 1)
    assert fitting_sets(config, plan, 200 * 10**9) == 43
    assert 35 <= fitting_sets(config, plan, 150 * 10**9) < 43
    with pytest.raises(ValueError, match=r"take \d+\.\d GB, the GPU has 10\.0 GB"):
        fitting_sets(config, plan, 10 * 10**9)
    with pytest.raises(ValueError, match="layers: got 44, the model has 43"):
        truncated(ModelConfig.flash(), 44, has_drafts=False)


def test_experts_of_few_layers_are_not_shared_by_all() -> None:
    """They would still be in L2 when they are read again: 1 GB of other reads is the least."""
    config = truncated(ModelConfig.flash(), None, has_drafts=False)
    assert reuse_bytes(config, 5) == 5 * reuse_bytes(config, 1)
    # A layer of a window alone has a floor of 50 us at 4.47 TB/s.
    assert reuse_bytes(config, 1) == pytest.approx(224e6, rel=0.02)
    check_reuse(config, 5)
    with pytest.raises(ValueError, match=r"read again after 0\.90 GB of others, needs 1 GB"):
        check_reuse(config, 4)
    check_reuse(truncated(config, 2, has_drafts=False), 2)  # nothing is shared


def test_the_command_needs_a_gpu_and_refuses_what_is_no_number(capsys) -> None:
    if not torch.cuda.is_available():
        assert main(["bench", "step"]) == 2
        assert "needs a CUDA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "step", "--acceptance", "2"])
    assert "expected a share between 0 and 1" in capsys.readouterr().err


def test_cells_fit_the_columns() -> None:
    layers = {"CSA": bench.LayerTime(80.0, 57.0, 11.0)}
    shape = bench.Shape("flash", None, 1, 32768)
    result = bench.Result(shape, 43, 6, 6.0, 3400.0, 2560.0, None, layers, [])
    line = bench.cells(bench.as_row(result) | {"kinds": {"CSA": vars(layers["CSA"])}})
    assert len(line) == len(bench.COLUMNS)
    assert "43 (6 aliased)" in line and "80 (57), 11" in line and "294" in line
    row = bench.as_row(replace(result, shape=replace(shape, kv_format="bf16")))
    assert bench.cells(row | {"kinds": {}})[0] == "flash, bf16 keys"


@pytest.mark.parametrize("chunk", [pytest.param(40, marks=pytest.mark.slow), 64, 500])
def test_prefill_caches_a_whole_prompt_however_it_is_cut(made, chunk: int) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        run = prefill._Bench(made, prefill.Shape("tiny", None, 130, chunk))
        tokens = [run.run() for _ in range(2)]
        run.tokens = torch.randint(made.model.config.vocab_size, (130,)).tolist()
        other = made.model.logits(made.model.streams(*_whole(run)))[0, -1]
        assert run.run().item() == other.argmax().item()
    assert run.manager.length(run.slot) == 130
    assert tokens[0].shape == (1, 1) and torch.equal(*tokens)
    assert sum(end - start for start, end in run._spans()) == 130


def _whole(run) -> tuple:
    """Tokens, cache and step of a bench's prompt in one forward."""
    alone = prefill._Bench(run.made, replace(run.shape, chunk=run.shape.prompt))
    step = alone.manager.step([alone.slot], [run.shape.prompt], run.shape.prompt)
    return torch.tensor([run.tokens]), alone.cache, step


def test_floor_of_a_prefill_is_that_of_its_flops(monkeypatch) -> None:
    """8,192 tokens of Flash at once: 13 G active parameters, most at the rate of FP8."""
    machine = Machine("H200", 4.4e12, 4.4e12, 8e14)
    run = object.__new__(prefill._Bench)
    config = truncated(ModelConfig.flash(), None, has_drafts=False)
    run.made = SimpleNamespace(model=SimpleNamespace(config=config))
    run.shape = prefill.Shape("flash", None, 8192, 8192)
    whole = run.floor(machine)
    run.shape = replace(run.shape, chunk=1024)
    assert 100e3 < whole < 200e3
    # Chunks of 1,024 read every expert eight times.
    assert run.floor(machine) > whole + 6 * 35e3 * 0.3


def test_cells_of_a_prefill_fit_its_columns() -> None:
    shape = prefill.Shape("flash", None, 8192, 4096)
    row = prefill.as_row(prefill.Result(shape, 43, 6, 5e5, 1.5e5, []))
    assert len(prefill.cells(row)) == len(prefill.COLUMNS)
    assert prefill.cells(row)[4:] == ["500.0", "150.0", "30%", "16384"]


def test_time_between_steps_is_that_between_replays() -> None:
    """Three replays of three kernels each, two of which overlap, and a single kernel between."""

    def kernel(correlation: int, start: float, end: float) -> dict:
        return {
            "cat": "kernel",
            "ts": start,
            "dur": end - start,
            "args": dict(correlation=correlation),
        }

    found = []
    for number, start in enumerate((0.0, 103.0, 210.0)):
        spans = (0, 40), (35, 100), (60, 90)
        found += [kernel(number, start + a, start + b) for a, b in spans]
    found += [kernel(9, 205.0, 206.0), {"cat": "gpu_memcpy", "ts": 101.0, "dur": 1.0}]
    assert engine.gaps(found) == [3.0, 7.0]
    with pytest.raises(ValueError, match="the trace has 1 replays"):
        engine.gaps(found[:3])


def test_cells_of_an_engine_fit_its_columns() -> None:
    row = engine.as_row(engine.Result(engine.Shape("flash", 5, 4, 256), 5, 0, 2e3, 2.5, 9.0, []))
    assert len(engine.cells(row)) == len(engine.COLUMNS)
    assert engine.cells(row)[4:] == ["2.00", "2000", "2.5", "9.0"]


def _trace(path: Path) -> None:
    """Four layers of two kernels, and one of torch's before them."""
    symbol = "kernel_cutlass_kernel_dsv4kernels{}_object_at__tensorptr"
    names = [symbol.format("moegateGate"), symbol.format("gemmsm90streamingStreamingLinear")]
    spans = [("void at::native::copy", 5.0, 1.0)]
    spans += [(names[i % 2], 10.0 + 10 * i, 12.0) for i in range(8)]
    events = [{"cat": "kernel", "name": n, "ts": 100 + t, "dur": d} for n, t, d in reversed(spans)]
    path.write_text(json.dumps({"traceEvents": [*events, {"cat": "cpu_op", "ts": 0, "dur": 1}]}))


def test_a_kernel_that_waits_for_the_one_before_does_not_count_the_wait() -> None:
    spans = [
        Span("second", 2.0, 15.0),  # starts early
        Span("first", 0.0, 10.0),
        Span("beside", 3.0, 9.0),  # of another stream
        Span("first", 20.0, 24.0),
    ]
    wanted = [("first", 2, 14.0), ("second", 1, 5.0), ("beside", 1, 0.0)]
    assert own_times(spans) == wanted
    assert own_times([]) == []


def test_a_timeline_names_kernels_and_shows_layers(tmp_path) -> None:
    _trace(tmp_path / "trace.json")
    found = timeline.bars(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert found[:3] == [
        (timeline.OTHERS, 0.0, 1.0),
        ("Gate", 5.0, 17.0),
        ("StreamingLinear", 15.0, 27.0),
    ]
    assert timeline.window(found) == (25.0, 65.0)
    assert timeline.window(found[:2]) == (0.0, 17.0)
    for router in timeline.ROUTERS[1:]:
        others = [bar._replace(kernel=bar.kernel.replace("Gate", router)) for bar in found]
        assert timeline.window(others) == timeline.window(found)
    with pytest.raises(ValueError, match="no kernels"):
        timeline.bars([{"cat": "cpu_op"}])


def test_a_timeline_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="draws: needs the bench extra")
    _trace(tmp_path / "trace.json")
    timeline.draw(tmp_path / "trace.json", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
