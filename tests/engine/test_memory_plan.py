"""The memory plan: equal to what a model and its cache take once they are made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4.cli.main import main
from dsv4.config.model_config import ModelConfig
from dsv4.engine.engine import Engine
from dsv4.engine.memory_plan import plan_memory
from dsv4.engine.sampling_params import SamplingParams
from dsv4.model.model import DeepseekV4

pytestmark = pytest.mark.stage("cache")

TINY = Path(__file__).parents[2] / "checkpoints" / "tiny"


def test_the_plan_is_what_the_objects_take() -> None:
    config = ModelConfig.from_json(TINY)
    options = {"max_draft": 1, "chunk": 64, "prefix_snapshots": 5, "device_type": "cpu"}
    plan = plan_memory(config, 1000, 3, **options)
    model = DeepseekV4(config)
    cache = model.new_cache(3, 3 * 8, 8, max_draft=1, max_tokens=64)
    assert plan.weights == sum(p.nbytes for p in model.parameters())

    def size(tensors) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    assert plan.windows == size(layer.window.data for layer in cache.layers)
    assert plan.states == size(r.data for s in cache.state.layers for r in s.rings())
    assert plan.entries == size(x.entries.data for x in cache.layers if x.entries is not None)
    assert plan.index_keys == size(
        x.index_keys.data for x in cache.layers if x.index_keys is not None
    )
    engine = Engine(model, 3, 1000, num_draft_tokens=1, prefix_snapshots=5)
    engine.add([1], SamplingParams(max_new_tokens=1, presence_penalty=0.5))
    state = engine._state
    assert plan.requests == size(
        [*state.tensors(), state.history.prompted, state.history.generated]
    )
    assert plan.snapshots == size(engine._reuse._rings._copies)
    parts = plan.weights + plan.cache + plan.requests + plan.snapshots + plan.working
    assert plan.total == parts


def test_flash_takes_more_than_one_h200_and_its_cache_grows_as_its_layers_say() -> None:
    """Facts of the release: 156 GB without drafts; a token costs 3,850 bytes of entries and keys
    at most (index keys of 132 bytes)."""
    config = ModelConfig.flash()
    short, long = plan_memory(config, 32768, 1), plan_memory(config, 65536, 1)
    assert 159e9 < short.weights < 162e9
    per_token = (long.cache - short.cache) / 32768
    assert 3400 < per_token < 4300
    assert plan_memory(config, 32768, 2).entries == 2 * short.entries


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1), "context must be at least 1, got 0"),
        ((128, 0), "requests must be at least 1, got 0"),
        ((2049, 1), "context must be at most 2048, the model's, got 2049"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_memory(ModelConfig.from_json(TINY), *sizes)


def test_doctor_prints_the_plan_and_who_holds_it(capsys: pytest.CaptureFixture) -> None:
    command = ["doctor", "--checkpoint", str(TINY), "--context", "1024", "--requests", "4"]
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr().out
    for name in ("memory: weights", "memory: peak", "fits one H200"):
        assert name in said
    assert "4 x 1,024 tokens" in said and "yes: holds" in said


def test_doctor_says_what_does_not_fit(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """With the sum of what requests own; what one request needs depends on no other."""
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.flash().to_json()))
    said = []
    for requests in (2, 256):
        sizes = ["--context", "131072", "--requests", str(requests)]
        assert main(["doctor", "--checkpoint", str(tmp_path), *sizes, "--json"]) == 0
        lines = json.loads(capsys.readouterr().out)
        said.append({line["name"]: line["detail"] for line in lines})
    assert said[0]["fits one H200"] == said[1]["fits one H200"]
    assert said[0]["fits one H200"].startswith("no: one request needs")
    assert said[0]["fits one B200"].startswith("yes") and said[1]["fits one B200"].startswith("no")
    plan = plan_memory(ModelConfig.flash(), 131072, 256)
    assert said[1]["memory: cache"] == f"{plan.cache / 2**30:.2f} GiB of 256 x 131,072 tokens"
    sizes = ["--context", "131072", "--requests", "2", "--kv-format", "bf16"]
    assert main(["doctor", "--checkpoint", str(tmp_path), *sizes, "--json"]) == 0
    lines = {line["name"]: line["detail"] for line in json.loads(capsys.readouterr().out)}
    plan = plan_memory(ModelConfig.flash(), 131072, 2, kv_format="bf16")
    assert plan.entries > plan_memory(ModelConfig.flash(), 131072, 2).entries
    assert lines["memory: cache"] == f"{plan.cache / 2**30:.2f} GiB of 2 x 131,072 tokens"
    for name in ("context", "kv-format"):
        assert main(["doctor", f"--{name}", "5"]) == 2
        assert f"--{name}: needs --checkpoint" in capsys.readouterr().err
