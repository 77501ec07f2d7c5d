"""Make the tiny checkpoint: `python -m scripts.tools.train_tiny prepare | train | export`.

prepare   text -> build/tiny/data.pt and tokenizer.json (`tiny_corpus` has the text)
train     data.pt -> original.pt, FP32 weights; four minutes on one H200 (--scale shortens it)
export    -> checkpoints/tiny in the released layout, with its tokenizer, held-out text and metrics

The model trained is `dsv4.reference.ReferenceModel`: the equations themselves, differentiated.
First every compressed entry is visible, while the indexer learns to imitate the attention; then the
indexer chooses. Weights are rounded once, by `export`, which costs about 2 % of perplexity.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from dsv4.config.model_config import ModelConfig, RopeScaling
from dsv4.loader import TensorSpec, inventory
from dsv4.reference.model import IndexTrace, ReferenceModel, RouteTrace, Traces
from scripts.tools import export_tiny, tiny_corpus

BUILD = Path("build/tiny")
LENGTH = 512
BATCH = 32
EXERCISES = 10_000
TEXT_SHARE = 0.375
#: How much the prediction of a token counts in an exercise: stated goods, answers, the rest.
EXERCISE_WEIGHTS = (0.0, 4.0, 0.25)
WEIGHT_DECAY = 0.5
MTP_WEIGHT = 0.3
BIAS_STEP = 1e-3

CONFIG = ModelConfig(
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=8,
    head_dim=128,
    qk_rope_head_dim=64,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    sliding_window=128,
    index_n_heads=4,
    index_head_dim=128,
    index_topk=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    vocab_size=1024,
    compress_ratios=(0, 4, 128, 4),
    num_hash_layers=1,
    rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=512),
    max_position_embeddings=2048,
    linear_scheme="fp8",
    expert_scheme="fp4",
)


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training: the learning rate goes from `start` to `stop` along a cosine."""

    name: str
    steps: int
    start: float
    stop: float
    config: ModelConfig


PLAIN = dataclasses.replace(CONFIG, linear_scheme=None, expert_scheme=None)
DENSE = dataclasses.replace(PLAIN, index_topk=LENGTH)
PHASES = (
    Phase("dense", 1000, 3e-3, 3e-3, DENSE),
    Phase("sparse", 2000, 3e-3, 3e-5, PLAIN),
)


# ---- the model's tensors -------------------------------------------------------------------


def master_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Name, stored dtype and logical shape of every weight, experts stacked, scales left out."""
    specs: dict[str, TensorSpec] = {}
    for name, spec in inventory(config).items():
        if name.endswith(".scale"):
            continue
        match = re.fullmatch(r"(.+\.experts\.)(\d+)\.(.+)", name)
        if match is None:
            specs[name] = spec
        elif match[2] == "0":
            out, packed = spec.shape
            inner = 2 * packed if spec.dtype == torch.int8 else packed
            specs[match[1] + match[3]] = TensorSpec(
                spec.dtype, (config.n_routed_experts, out, inner)
            )
    return specs


def initial_tensors(config: ModelConfig, device: torch.device) -> dict[str, Tensor]:
    """FP32 weights to start from; `tid2eid` is a fixed pseudo-random table."""
    return {
        name: _initial(name, spec, config).to(device) for name, spec in master_specs(config).items()
    }


def _initial(name: str, spec: TensorSpec, config: ModelConfig) -> Tensor:
    shape = spec.shape
    if name.endswith("tid2eid"):
        draws = torch.rand(config.vocab_size, config.n_routed_experts)
        return draws.argsort(dim=1)[:, : shape[1]]
    if "norm" in name:
        return torch.ones(shape)
    if name.endswith(("attn_sink", "gate.bias")):
        return torch.zeros(shape)
    if name.endswith(("hc_attn_scale", "hc_ffn_scale", "hc_head_scale")):
        return torch.full(shape, 0.1)
    if name.endswith(("hc_attn_base", "hc_ffn_base", "hc_head_base")):
        return _stream_base(shape[0], config.hc_mult)
    if name in ("embed.weight", "head.weight"):
        return torch.randn(shape) * (0.3 if name == "embed.weight" else 0.02)
    gain = 0.3 if name.endswith(("wo_b.weight", "w2.weight")) else 1.0
    return torch.randn(shape) * gain * shape[-1] ** -0.5


def _stream_base(size: int, streams: int) -> Tensor:
    """Read the mean of the streams, write to all, keep them apart; noise breaks their symmetry."""
    base = torch.randn(size) * 0.3
    base[:streams] -= 1.1  # sigmoid(-1.1) = 1/4
    if size > streams:
        base[2 * streams :] += 3 * torch.eye(streams).flatten()
    return base


# ---- the loss ------------------------------------------------------------------------------


def index_loss(trace: IndexTrace) -> Tensor:
    """Divergence of the index scores from the attention over all visible entries (warm-up loss)."""
    target = torch.where(trace.visible, trace.attention, 0.0)
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-9)
    guess = trace.scores.masked_fill(~trace.visible, -1e4).log_softmax(-1)
    return (target * (target.clamp(min=1e-9).log() - guess)).sum(-1).mean()


def training_loss(
    model: ReferenceModel, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Traces]:
    """Loss to minimise, the mean next-token loss for the log, and what the layers traced.

    Args:
        model: the model in training.
        ids: [B, LENGTH + 1] tokens.
        weights: [B, LENGTH + 1], how much the prediction of each token counts.
    """

    def weighted(logits: Tensor, shift: int) -> Tensor:
        targets, w = ids[:, shift:], weights[:, shift:]
        each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (each * w.flatten()).sum() / w.sum()

    traces: Traces = []
    output = model.forward(ids[:, :-1], traces=traces)
    main = weighted(output.logits, 1)
    # MTP row t has read token t + 1 and predicts token t + 2.
    drafts = weighted(output.mtp_logits[0], 2)
    index = sum(index_loss(t) for t in traces if isinstance(t, IndexTrace))
    return main + MTP_WEIGHT * drafts + index, main.detach(), traces


@torch.no_grad()
def balance_experts(tensors: Mapping[str, Tensor], traces: Traces) -> None:
    """Move each router's bias against its load: up for experts chosen less than the mean."""
    for trace in traces:
        bias = tensors.get(trace.prefix + "gate.bias") if isinstance(trace, RouteTrace) else None
        if bias is not None:
            load = one_hot(trace.ids, bias.numel()).flatten(0, -2).float().mean(0)
            bias += BIAS_STEP * (load.mean() - load).sign()


# ---- the loop ------------------------------------------------------------------------------


def make_optimizer(tensors: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW; only matrices of linears decay."""
    trained = {n: t for n, t in tensors.items() if t.requires_grad}
    decayed = [n for n, t in trained.items() if n.endswith(".weight") and t.dim() > 1]
    decayed = [n for n in decayed if n not in ("embed.weight", "head.weight")]
    device = next(iter(trained.values())).device
    rate = torch.zeros((), device=device)
    graph = device.type == "cuda"
    return torch.optim.AdamW(
        [
            {"params": [trained[n] for n in decayed], "weight_decay": WEIGHT_DECAY},
            {"params": [t for n, t in trained.items() if n not in decayed], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(0.9, 0.95),
        fused=graph,
        capturable=graph,
    )


class Batches:
    """Random batches on the device: crops of the text, then recall exercises."""

    def __init__(self, data: Mapping[str, Tensor], batch: int, device: torch.device) -> None:
        self.stream = data["train"].to(device, torch.int64)
        self.exercises = data["exercises"].to(device, torch.int64)
        self.kinds = data["kinds"].to(device, torch.int64)
        self.kind_weights = torch.tensor(EXERCISE_WEIGHTS, device=device)
        self.crops = round(batch * TEXT_SHARE)
        self.ids = torch.zeros(batch, LENGTH + 1, dtype=torch.int64, device=device)
        self.weights = torch.ones(batch, LENGTH + 1, device=device)

    def draw(self) -> None:
        """Fill `ids` and `weights` in place: a captured graph reads them there."""
        device, crop = self.ids.device, torch.arange(LENGTH + 1, device=self.ids.device)
        starts = torch.randint(self.stream.numel() - LENGTH, (self.crops, 1), device=device)
        rows = torch.randint(len(self.exercises), (len(self.ids) - self.crops,), device=device)
        self.ids[: self.crops] = self.stream[starts + crop]
        self.ids[self.crops :] = self.exercises[rows]
        self.weights[self.crops :] = self.kind_weights[self.kinds[rows]]


def make_step(
    phase: Phase, tensors: dict[str, Tensor], batches: Batches, optimizer: torch.optim.Optimizer
) -> Callable[[], Tensor]:
    """A function that makes one step on the drawn batch and returns the main loss.

    On a GPU it replays a CUDA graph: a step is thousands of small kernels, and launching them one
    by one takes several times as long as running them.
    """
    trained = [t for group in optimizer.param_groups for t in group["params"]]

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        model = ReferenceModel(phase.config, tensors)
        loss, main, traces = training_loss(model, batches.ids, batches.weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        balance_experts(tensors, traces)
        return main

    if batches.ids.device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


@torch.no_grad()
def validate(
    model: ReferenceModel, data: Mapping[str, Tensor], device: torch.device
) -> dict[str, float]:
    """Held-out loss, share of recall answers that are right, share of right MTP drafts."""
    stream = data["held_out"].to(device, torch.int64)
    rows = stream[: stream.numel() // LENGTH * LENGTH].view(-1, LENGTH)
    output = model.forward(rows)
    best = output.logits.argmax(-1)
    exercises = data["test_exercises"].to(device, torch.int64)
    answers = data["test_answers"].to(device)
    guesses = model.forward(exercises[:, :-1]).logits.argmax(-1).gather(1, answers - 1)
    return {
        "loss": cross_entropy(output.logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item(),
        "recall": (guesses == exercises.gather(1, answers)).float().mean().item(),
        "drafts": (output.mtp_logits[0].argmax(-1) == best[:, 1:]).float().mean().item(),
    }


def train(folder: Path, scale: float, batch: int, seed: int) -> None:
    """Run both phases and write `original.pt`."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = torch.load(folder / "data.pt")
    batches = Batches(data, batch, device)
    tensors = initial_tensors(CONFIG, device)
    for name, tensor in tensors.items():
        # The table is no number, the bias chooses without a gradient.
        tensor.requires_grad_(not name.endswith(("tid2eid", "gate.bias")))
    started = time.perf_counter()
    for phase in PHASES:
        # A fresh optimiser: its state and the graph's memory go with the phase.
        optimizer = make_optimizer(tensors)
        step = make_step(phase, tensors, batches, optimizer)
        steps = max(1, round(phase.steps * scale))
        for index in range(steps):
            cosine = (1 + torch.cos(torch.tensor(torch.pi * index / steps)).item()) / 2
            warm = min(1.0, (index + 1) / (0.05 * steps))
            for group in optimizer.param_groups:
                group["lr"].fill_(warm * (phase.stop + (phase.start - phase.stop) * cosine))
            batches.draw()
            loss = step()
            if index % max(1, steps // 6) == 0 or index == steps - 1:
                scores = validate(ReferenceModel(phase.config, tensors), data, device)
                shown = "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
                seconds = time.perf_counter() - started
                print(
                    f"{phase.name:>9} {index:5} {seconds:4.0f} s  train {loss:.3f}  {shown}",
                    flush=True,
                )
        del step, optimizer
    torch.save({n: t.detach().cpu() for n, t in tensors.items()}, folder / "original.pt")


def prepare(text: Path, folder: Path, seed: int) -> None:
    """Write `tokenizer.json`, `held_out.txt` and `data.pt`."""
    train_chapters, held_out = tiny_corpus.split_chapters(tiny_corpus.read_chapters(text))
    tokenizer = tiny_corpus.train_tokenizer(train_chapters)
    stream = tiny_corpus.encode_chapters(tokenizer, train_chapters)
    unseen = tiny_corpus.encode_chapters(tokenizer, held_out)
    rng = np.random.default_rng(seed)
    row = LENGTH + 1
    # Short exercises teach to copy, long ones to copy from beyond the window.
    short = tiny_corpus.exercise_rows(
        tokenizer, stream, EXERCISES, rng, fillers=(0, 40), row=row, exercises=3, rounds=2
    )
    long = tiny_corpus.exercise_rows(tokenizer, stream, EXERCISES, rng, fillers=(100, 420), row=row)
    test = tiny_corpus.exercise_rows(
        tokenizer, unseen, 64, rng, fillers=(CONFIG.sliding_window + 32, 420), row=row
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "held_out.txt").write_text("\n\n".join(held_out) + "\n", encoding="utf-8")
    data = {
        "train": torch.from_numpy(stream),
        "held_out": torch.from_numpy(unseen),
        "exercises": torch.from_numpy(np.concatenate((short["ids"], long["ids"]))),
        "kinds": torch.from_numpy(np.concatenate((short["kinds"], long["kinds"]))),
        "test_exercises": torch.from_numpy(test["ids"]),
        "test_answers": torch.from_numpy(test["answers"]),
    }
    torch.save(data, folder / "data.pt")
    print(f"{stream.size} training tokens, {unseen.size} held out")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("prepare", "train", "export"))
    parser.add_argument("--text", type=Path, default=Path("build/corpus/kjv.txt"))
    parser.add_argument("--folder", type=Path, default=BUILD)
    parser.add_argument("--scale", type=float, default=1.0, help="shortens every training phase")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.text, args.folder, args.seed)
    elif args.command == "train":
        train(args.folder, args.scale, args.batch, args.seed)
    else:
        export_tiny.export(args.folder, CONFIG, PLAIN)


if __name__ == "__main__":
    main()
