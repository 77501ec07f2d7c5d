"""`dsv4 sim attention --model-table`: modelled times of Pro and Flash, beside published ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsv4.cli.sim_attention import Workload, compile_attention, make_timing_call
from dsv4.simulator.api import Simulation
from dsv4.simulator.timing import MACHINES, Machine, Prediction, predict

TOKENS = (1, 4, 16, 64, 128, 256, 1024)
MODELS = {"Pro": (128, 1024), "Flash": (64, 512)}  # heads, compressed rows per token

# FLOP per cycle and SM of bf16 products: m64n256 and larger, both sources of machine.py.
PEAK = {"sm_100a": 8153, "sm_90a": 4096}

# (architecture, model, tokens) -> what others take for the shape, and in which precision.
PUBLISHED = {
    ("sm_100a", "Flash", 1): "26.6 bf16 q, fp8 KV, fused (FlashMLA, vllm#57711)",
    ("sm_100a", "Flash", 15): "12.4 bf16 (FlashInfer cake, flashinfer#4573), 21.1 (trtllm-gen)",
    ("sm_100a", "Pro", 128): "27.1 fp8 (trtllm-gen, TensorRT-LLM#14823)",
}


@dataclass(frozen=True)
class Row:
    """One shape: its modelled time, and the floor that bytes and FLOPs set."""

    name: str
    workload: Workload
    prediction: Prediction
    floor: float  # microseconds
    published: str

    @property
    def columns(self) -> tuple[str, ...]:
        """As text, in the order of `HEADER`."""
        work, longest = self.workload, self.prediction.longest
        time = self.prediction.microseconds
        return (
            self.name,
            str(work.tokens),
            str(work.splits),
            f"{time:.1f}",
            f"{self.floor:.1f}",
            f"{self.floor / time:.0%}",
            f"{work.flops / time / 1e6:.0f}",
            longest.bound,
            self.published,
        )


HEADER = (
    "model", "T", "splits", "model us", "floor us", "of floor", "TFLOP/s", "busiest unit",
    "published us",
)  # fmt: skip


def rows(arch: str) -> Iterator[Row]:
    """Every shape of Pro and Flash for an architecture, as they are done."""
    machine = MACHINES[arch]
    for name, (heads, top_k) in MODELS.items():
        base = Workload(arch, heads, top_k)
        simulation = Simulation.of_compiled(compile_attention(base).function)
        listed = {tokens for key_arch, key_name, tokens in PUBLISHED
                  if (key_arch, key_name) == (arch, name)}  # fmt: skip
        for tokens in sorted({*TOKENS, *listed}):
            workload = replace(base, tokens=tokens)
            call = make_timing_call(workload, seed=0)
            prediction = predict(simulation, *call.tensors, **call.options)
            published = PUBLISHED.get((arch, name, tokens), "")
            yield Row(name, workload, prediction, floor(workload, machine), published)


def floor(workload: Workload, machine: Machine) -> float:
    """Microseconds that no kernel beats: bytes over bandwidth or FLOPs over rate, as measured."""
    rate = PEAK[workload.arch] * machine.multiprocessors * machine.clock_ghz * 1e9
    return 1e6 * max(workload.bytes / machine.hbm_bytes_per_second, workload.flops / rate)


def print_table(arch: str) -> None:
    """Print the rows as Markdown while they come."""
    print(f"{MACHINES[arch].name} model, {arch}: predictions, not measurements")
    print(_line(HEADER))
    print(_line(["---"] * len(HEADER)))
    for row in rows(arch):
        print(_line(row.columns), flush=True)


def _line(cells) -> str:
    return "| " + " | ".join(cells) + " |"
