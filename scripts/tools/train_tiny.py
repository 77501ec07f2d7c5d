"""Make the tiny checkpoint: `python -m scripts.tools.train_tiny prepare | train | export`.

prepare   text -> build/tiny/data.pt and tokenizer.json (`tiny_corpus` has the text)
train     data.pt -> state.pt; stops after --seconds, and the same command goes on from there
export    state.pt -> checkpoints/tiny in the released layout, with what is needed to judge it

The model trained is `tiny_model.TrainedModel`, under the roundings of inference from the first step
to the last, in two stages. In each, every compressed entry is visible at first, while the indexer
learns to imitate the attention; then the indexer chooses. Recall rows of the first stage state at
one phase of a compressor's blocks, those of the second at every phase. All steps take about seven
minutes of one H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dsv4.config.model_config import ModelConfig, RopeScaling
from dsv4.loader import TensorSpec, inventory
from dsv4.reference.model import ReferenceModel
from scripts.tools import export_tiny, tiny_corpus, tiny_evaluate
from scripts.tools.tiny_batches import Batches, RecallKind
from scripts.tools.tiny_layers import index_loss
from scripts.tools.tiny_model import TrainedModel
from scripts.tools.tiny_rounding import rounded

BUILD = Path("build/tiny")
LENGTH = 512
BATCH = 32
#: Short gaps teach to copy, long ones to copy from beyond the window.
RECALL = (
    RecallKind(share=0.0625, pairs=8, rounds=4, gap=(0, 60)),
    RecallKind(share=0.125, pairs=8, rounds=1, gap=(100, 430)),
    RecallKind(share=0.0625, pairs=20, rounds=2, gap=(60, 240)),
)
#: Filler lengths of the recall tests that training prints.
TEST_FILLERS = ((0, 40), (100, 160), (160, 240), (240, 330), (330, 420))
#: Weight of a name or mark in a list of answers, where a token of text weighs 1.
FORM_WEIGHT = 0.25
#: Weight of a token that asks for an answer in the indexer's loss, others weigh 1.
INDEX_ASK_WEIGHT = 16.0
WARM_UP = 200
WEIGHT_DECAY = 0.1
MTP_WEIGHT = 0.3
BIAS_STEP = 1e-3
LOG_EVERY = 400


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training, from the weights that its start would store.

    Attributes:
        first, last: its steps, `last` not among them.
        sparse_from: first step at which the indexer chooses entries.
        peak_rate: learning rate once warm; decay: it falls from here, to nothing at there.
        dropout: share of embeddings and outputs of sublayers that rows of text lose.
        lead, bare: see `Batches`.
    """

    first: int
    last: int
    sparse_from: int
    peak_rate: float
    decay: tuple[int, int]
    dropout: float
    lead: int
    bare: float


#: The first one was stopped before its rate had fallen to nothing.
STAGES = (
    Stage(0, 4000, 1346, 2.5e-3, (2244, 4489), dropout=0.1, lead=0, bare=0.0),
    Stage(4000, 8000, 5000, 1.5e-3, (5600, 8000), dropout=0.2, lead=15, bare=0.25),
)

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


PLAIN = dataclasses.replace(CONFIG, linear_scheme=None, expert_scheme=None)


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


class Losses(NamedTuple):
    """What a step minimises, and its parts for the log: mean losses of text and of answers."""

    total: Tensor
    text: Tensor
    answers: Tensor


def training_loss(
    model: TrainedModel,
    tensors: Mapping[str, Tensor],
    batch: Batches,
    sparse: Tensor,
    dropout: float,
) -> tuple[Losses, dict[str, Tensor]]:
    """Losses of a batch, and the load of each expert by its router's prefix."""
    weights, asks = batch.weights, batch.asks
    out = model.forward(tensors, batch.ids, dropout * batch.is_text, sparse)

    def weighted(losses: Tensor, shift: int) -> Tensor:
        return (losses * weights[:, shift:]).sum() / weights[:, shift:].sum()

    places = torch.where(asks, INDEX_ASK_WEIGHT, 1.0)
    index = sum(index_loss(*indexed, places) for indexed in out.indexed)
    total = weighted(out.main, 1) + MTP_WEIGHT * weighted(out.drafts, 2) + index
    with torch.no_grad():
        text = out.main[: batch.crops].mean()
        answers = (out.main * asks).sum() / asks.sum().clamp(min=1)
    return Losses(total, text, answers), out.loads


@torch.no_grad()
def balance_experts(tensors: Mapping[str, Tensor], loads: Mapping[str, Tensor]) -> None:
    """Move each router's bias against its load: up for experts chosen less than the mean."""
    for prefix, load in loads.items():
        bias = tensors[prefix + "gate.bias"]
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


def make_step(
    model: TrainedModel,
    tensors: dict[str, Tensor],
    batch: Batches,
    sparse: Tensor,
    optimizer: torch.optim.Optimizer,
    dropout: float,
) -> Callable[[], Losses]:
    """A function that makes one step on the drawn batch and returns its losses.

    On a GPU a step replays a CUDA graph: it is thousands of small kernels, and launching them one
    by one takes several times as long as running them. The graph reads the tensors of all its
    arguments: they must outlive the function.
    """
    trained = [t for group in optimizer.param_groups for t in group["params"]]
    specs, device = master_specs(CONFIG), batch.ids.device

    def step() -> Losses:
        optimizer.zero_grad(set_to_none=True)
        losses, loads = training_loss(model, rounded(tensors, specs), batch, sparse, dropout)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        balance_experts(tensors, loads)
        return losses

    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = step()

    def replay() -> Losses:
        graph.replay()
        return losses

    return replay


@torch.no_grad()
def validate(model: ReferenceModel, data: Mapping[str, Tensor], device: torch.device) -> str:
    """Held-out loss, share of right MTP drafts, share of right recall answers by filler length.

    Test rows are moved by 0 to 3 tokens in turn.
    """
    rows = data["held_out"].to(device, torch.int64)
    output = model.forward(rows)
    best = output.logits.argmax(-1)
    loss = cross_entropy(output.logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    drafts = (output.mtp_logits[0].argmax(-1) == best[:, 1:]).float().mean().item()
    del output
    shares = []
    for (low, high), ids, answers in zip(TEST_FILLERS, data["test_ids"], data["test_answers"]):
        ids, answers = (part.to(device) for part in tiny_evaluate.in_phases(ids, answers))
        guesses = model.forward(ids[:, :-1]).logits.argmax(-1).gather(1, answers - 1)
        share = (guesses == ids.gather(1, answers)).float().mean().item()
        shares.append(f"{low}-{high}: {share:4.0%}")
    return f"held out {loss:.3f}  drafts {drafts:.3f}  recall " + "  ".join(shares)


def learning_rate(stage: Stage, step: int, since_start: int) -> float:
    """Warm-up, constant, then linear to nothing; every piece warms its fresh optimiser up."""
    warm = min(1.0, (since_start + 1) / WARM_UP)
    start, end = stage.decay
    return stage.peak_rate * warm * min(1.0, (end - step) / (end - start))


def stage_of(step: int) -> Stage | None:
    """The stage that makes this step; None when all are made."""
    return next((stage for stage in STAGES if step < stage.last), None)


def train(folder: Path, seconds: float, seed: int) -> bool:
    """Train for so many seconds from where `state.pt` stands; True once all steps are made."""
    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = torch.load(folder / "data.pt")
    first, tensors = start(folder, device, seed)
    while (stage := stage_of(first)) is not None:
        first = train_stage(stage, first, tensors, data, folder, seed, started + seconds)
        if time.perf_counter() - started > seconds:
            break
    return stage_of(first) is None


def train_stage(
    stage: Stage,
    first: int,
    tensors: dict[str, Tensor],
    data: Mapping[str, Tensor],
    folder: Path,
    seed: int,
    until: float,
) -> int:
    """Make the steps of a stage from `first` on, in place; the step that is next.

    Stops early, where it writes `state.pt`, once `time.perf_counter()` is past `until`.
    """
    device = tensors["head.weight"].device
    if first == stage.first > 0:
        store(tensors)
    batch = Batches(
        data,
        RECALL,
        batch=BATCH,
        length=LENGTH,
        form_weight=FORM_WEIGHT,
        device=device,
        lead=stage.lead,
        bare=stage.bare,
    )
    optimizer = make_optimizer(tensors)
    torch.manual_seed(seed + first)
    batch.draw(seed * STAGES[-1].last + first)
    sparse = torch.tensor(first >= stage.sparse_from, device=device)
    model = TrainedModel(CONFIG, length=LENGTH, device=device)
    make = make_step(model, tensors, batch, sparse, optimizer, stage.dropout)
    began = time.perf_counter()
    print(f"ready for step {first}", flush=True)
    for step in range(first, stage.last):
        for group in optimizer.param_groups:
            group["lr"].fill_(learning_rate(stage, step, step - first))
        sparse.fill_(step >= stage.sparse_from)
        batch.draw(seed * STAGES[-1].last + step)
        losses = make()
        made = step + 1
        if made % LOG_EVERY and made != stage.last:
            continue
        text, answers = losses.text.item(), losses.answers.item()
        elapsed = time.perf_counter() - began
        scores = validate(stored_model(tensors), data, device)
        print(
            f"{made:6} {elapsed:4.0f} s  text {text:.3f}  answers {answers:.3f}  {scores}",
            flush=True,
        )
        save_state(folder, tensors, made)
        if time.perf_counter() > until:
            break
    return made


@torch.no_grad()
def store(tensors: Mapping[str, Tensor]) -> None:
    """Round the weights in place to what their files hold."""
    for name, tensor in rounded(tensors, master_specs(CONFIG)).items():
        tensors[name].copy_(tensor)


def stored_model(tensors: Mapping[str, Tensor]) -> ReferenceModel:
    """The reference model with the weights as they would be stored."""
    with torch.no_grad():
        return ReferenceModel(CONFIG, rounded(tensors, master_specs(CONFIG)))


def start(folder: Path, device: torch.device, seed: int) -> tuple[int, dict[str, Tensor]]:
    """Step and weights of `state.pt`, or step 0 and fresh weights."""
    file = folder / "state.pt"
    if file.exists():
        state = torch.load(file)
        first, tensors = state["step"], state["tensors"]
        tensors = {
            name: (tensor.float() if tensor.is_floating_point() else tensor).to(device)
            for name, tensor in tensors.items()
        }
    else:
        torch.manual_seed(seed)
        first, tensors = 0, initial_tensors(CONFIG, device)
    for name, tensor in tensors.items():
        # The table is no number, the bias chooses without a gradient.
        tensor.requires_grad_(not name.endswith(("tid2eid", "gate.bias")))
    return first, tensors


def save_state(folder: Path, tensors: Mapping[str, Tensor], step: int) -> None:
    """Write `state.pt`: large weights in bf16 (10 MB; their formats are coarser), small as is."""
    kept = {
        name: (
            tensor.bfloat16() if tensor.numel() > 4096 and tensor.is_floating_point() else tensor
        )
        for name, tensor in ((n, t.detach().cpu()) for n, t in tensors.items())
    }
    torch.save({"step": step, "tensors": kept}, folder / "state.pt")


def prepare(text: Path, folder: Path, seed: int) -> None:
    """Write `tokenizer.json`, `held_out.txt` and `data.pt`."""
    train_chapters, held_out = tiny_corpus.split_chapters(tiny_corpus.read_chapters(text))
    tokenizer = tiny_corpus.train_tokenizer(train_chapters)
    stream = tiny_corpus.encode_chapters(tokenizer, train_chapters)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "held_out.txt").write_text("\n\n".join(held_out) + "\n", encoding="utf-8")
    unseen = tiny_evaluate.held_out_tokens(folder, tokenizer)
    rng = np.random.default_rng(seed)
    tests = [
        tiny_corpus.exercise_rows(tokenizer, unseen, 32, rng, fillers=f, row=LENGTH + 1)
        for f in TEST_FILLERS
    ]
    writer = tiny_corpus.ExerciseWriter(tokenizer, rng)
    data = {
        "train": torch.from_numpy(stream),
        "held_out": torch.from_numpy(unseen[: unseen.size // LENGTH * LENGTH]).view(-1, LENGTH),
        "test_ids": torch.from_numpy(np.stack([t["ids"] for t in tests])).long(),
        "test_answers": torch.from_numpy(np.stack([t["answers"] for t in tests])),
        **tiny_corpus.exercise_tokens(writer),
    }
    torch.save(data, folder / "data.pt")
    print(f"{stream.size} training tokens, {unseen.size} held out")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("prepare", "train", "export"))
    parser.add_argument("--text", type=Path, default=Path("build/corpus/kjv.txt"))
    parser.add_argument("--folder", type=Path, default=BUILD)
    parser.add_argument("--seconds", type=float, default=540, help="length of a piece of training")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.text, args.folder, args.seed)
    elif args.command == "train":
        done = train(args.folder, args.seconds, args.seed)
        print("all steps are made" if done else "stopped; the same command goes on")
    else:
        _, tensors = start(args.folder, torch.device("cpu"), args.seed)
        original = {name: tensor.detach() for name, tensor in tensors.items()}
        export_tiny.export(original, args.folder, CONFIG, PLAIN)


if __name__ == "__main__":
    main()
