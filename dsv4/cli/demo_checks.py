"""Checks of the demo on the model it just ran. Each check computes its verdict from this run."""

from __future__ import annotations

import importlib.util
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import dsv4
from dsv4.cli.attention_watch import AttentionWatch
from dsv4.cli.demo import Check

if TYPE_CHECKING:
    from dsv4.model.model import DeepseekV4

WINDOW_TOKENS = 512
WINDOWS = 4
EXERCISES = 4
# More tokens than the sliding window holds: what was stated before them is out of its reach.
FILLER_TOKENS = 200
GAP = 0.25  # of logits whose order roundings of activations may swap
MOST_WIDENED = 2**30  # bytes of a checkpoint that is loaded once more, in float32
NAMES = ("Abraham", "Isaac", "Jacob", "Moses", "David", "Ruth", "Noah", "Mary")
GOODS = ("gold", "silver", "bread", "wine", "oil", "water", "sword", "corn", "salt", "honey")


def default_prompt(folder: Path) -> str:
    """The opening of the held-out text that ships with the checkpoint."""
    text = (folder / "held_out.txt").read_text(encoding="utf-8")
    return text[:200].rsplit(" ", 1)[0]


def run_all(model: DeepseekV4, tokenizer, folder: Path, prompt: list[int]) -> Iterator[Check]:
    """Yield the checks one by one, so that the demo shows them as they finish."""
    yield attention_through_op(model, prompt)
    yield op_against_oracle(model, prompt)
    yield decode_equals_prefill(model, prompt)
    if model.config.num_nextn_predict_layers:
        yield speculation_changes_nothing(folder, prompt)
    yield from held_out_loss(model, tokenizer, folder)
    yield recall_past_the_window(model, tokenizer, folder)
    yield blackwell_kernel_agrees(model, prompt)


def attention_through_op(model: DeepseekV4, prompt: list[int]) -> Check:
    """Every layer of every forward called `torch.ops.dsv4.sparse_fmha_paged`, exactly once."""
    steps = 8
    with AttentionWatch() as watch:
        model.generate([prompt], max_new_tokens=steps)
    layers = model.config.num_hidden_layers
    forwards, rest = divmod(watch.calls, layers)
    # One prefill gives the first token, each decode step one more.
    passed = rest == 0 and forwards == steps
    detail = f"{watch.calls} calls of the op = {forwards} forwards x {layers} layers"
    return Check("attention goes through torch.ops.dsv4.sparse_fmha_paged", passed, detail)


def op_against_oracle(model: DeepseekV4, prompt: list[int]) -> Check:
    """The op's output in the model's last forward equals the FP32 oracle on the same inputs."""
    from dsv4.testing.accuracy import BFLOAT16, Accuracy

    with AttentionWatch(keep=model.config.num_hidden_layers) as watch:
        model.generate([prompt], max_new_tokens=2)
    worst = 0.0
    for call in watch.kept:
        worst = max(worst, Accuracy.of(call.o, call.expected()).relative)
    bound = BFLOAT16.relative
    detail = f"worst relative error {worst:.1e} over {len(watch.kept)} layers (bound {bound:.0e})"
    return Check("op equals the FP32 oracle", worst <= bound, detail)


def decode_equals_prefill(model: DeepseekV4, prompt: list[int]) -> Check:
    """One prefill over prompt and continuation predicts the tokens that decode chose one by one."""
    new = model.generate([prompt], max_new_tokens=48).tokens[0]
    passed, detail = predicts(model, prompt, new)
    return Check("decode equals prefill", passed, detail)


def predicts(model: DeepseekV4, prompt: list[int], new: list[int]) -> tuple[bool, str]:
    """Whether one prefill finds each of the new tokens best, or as good as the best.

    Prefill and steps differ only by roundings, which may swap nearly equal candidates.
    """
    sequence = torch.tensor([prompt + new], device=model.device)
    logits = model(sequence)[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(new, device=model.device)
    gap = (logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]).max().item()
    same = int((logits.argmax(-1) == chosen).sum())
    detail = f"{same} of {len(new)} tokens the same; worst logit gap {gap:.3f} (bound {GAP})"
    return gap <= GAP, detail


def speculation_changes_nothing(folder: Path, prompt: list[int]) -> Check:
    """Greedy decoding with MTP drafts yields tokens that the model itself finds best.

    In float32, on the CPU: how many tokens a step has decides on some processors how products round
    to bf16. Roundings of activations remain, and whether two candidates as good as equal swap.
    """
    name = "MTP speculation yields the model's tokens"
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if size > MOST_WIDENED:
        return Check(
            name, None, f"a float32 copy of {size / 2**30:.0f} GiB of weights is too large"
        )
    model = dsv4.load(folder, device="cpu", dtype=torch.float32)
    drafted = model.generate([prompt], max_new_tokens=48, num_draft_tokens=1)
    passed, found = predicts(model, prompt, drafted.tokens[0])
    stats = drafted.stats
    share = stats.drafts_accepted / max(1, stats.drafts_proposed)
    detail = (
        f"{found}; drafts accepted {stats.drafts_accepted}/{stats.drafts_proposed} ({share:.0%})"
    )
    return Check(name, passed, detail)


def held_out_loss(model: DeepseekV4, tokenizer, folder: Path) -> Iterator[Check]:
    """Loss on text the model never saw, against a unigram model and without compressed KV."""
    ids = tokenizer.encode((folder / "held_out.txt").read_text(encoding="utf-8"))
    windows = min(WINDOWS, len(ids) // WINDOW_TOKENS)
    tokens = torch.tensor(ids[: windows * WINDOW_TOKENS], device=model.device)
    tokens = tokens.view(windows, WINDOW_TOKENS)
    loss = _loss(model, tokens)
    counts = Counter(ids)
    unigram = -sum(n / len(ids) * math.log(n / len(ids)) for n in counts.values())
    detail = f"{loss:.2f} nats a token; the text's own unigram entropy is {unigram:.2f}"
    yield Check("held-out loss", loss < 0.8 * unigram, detail)
    with AttentionWatch(drop_compressed=True):
        blind = _loss(model, tokens)
    detail = f"loss {blind:.2f} with the compressed branch off, {loss:.2f} with it"
    yield Check("the compressed branch matters", blind > loss, detail)


def recall_past_the_window(model: DeepseekV4, tokenizer, folder: Path) -> Check:
    """Statements repeated after a filler longer than the window: only compressed KV knows them."""
    filler = tokenizer.encode((folder / "held_out.txt").read_text(encoding="utf-8"))
    bos = model.config.bos_token_id
    start = [] if bos is None else [bos]
    exercises = [
        _exercise(tokenizer, start, filler[:FILLER_TOKENS], seed) for seed in range(EXERCISES)
    ]
    seen = sum(_recalled(model, *exercise) for exercise in exercises)
    with AttentionWatch(drop_compressed=True):
        blind = sum(_recalled(model, *exercise) for exercise in exercises)
    total = EXERCISES * len(NAMES)
    detail = f"{seen} of {total} facts recalled, {blind} with the compressed branch off"
    return Check("recall reaches past the window", seen >= 2 * max(blind, 1), detail)


def _exercise(
    tokenizer, start: list[int], filler: list[int], seed: int
) -> tuple[list[int], list[int]]:
    """Token ids of an exercise, and the positions of the answers in them."""
    rng = random.Random(seed)
    facts = list(zip(NAMES, rng.sample(GOODS, len(NAMES))))
    stated = "".join(f" unto {name} {good};" for name, good in facts)
    ids = [*start, *tokenizer.encode("Remember:" + stated + "\n"), *filler]
    ids += tokenizer.encode("\nRecall:")
    answers = []
    for name, good in rng.sample(facts, len(facts)):
        ids += tokenizer.encode(f" unto {name}")
        answers.append(len(ids))
        ids += tokenizer.encode(f" {good};")
    return ids, answers


def _recalled(model: DeepseekV4, ids: list[int], answers: list[int]) -> int:
    sequence = torch.tensor([ids], device=model.device)
    guesses = model(sequence)[0].argmax(-1)
    return sum(int(guesses[place - 1]) == ids[place] for place in answers)


def blackwell_kernel_agrees(model: DeepseekV4, prompt: list[int]) -> Check:
    """The compiled sm_100a kernel, simulated on this CPU, repeats one of this model's decode calls.

    The call is the last layer's of the latest decode step, its keys side by side. The output must
    be the oracle's for what the model's call saw, before it is rotated back, and the simulator's
    race checker must find nothing.
    """
    from dsv4.simulator import SimulatorError
    from dsv4.simulator.frontend.stub_library import c_compiler

    name = "Blackwell kernel, simulated, equals the oracle"
    if importlib.util.find_spec("cutlass") is None:
        return Check(name, None, "needs nvidia-cutlass-dsl, which is there for Linux")
    try:
        c_compiler()
    except SimulatorError as error:
        return Check(name, None, str(error))
    from dsv4.testing.accuracy import BFLOAT16, Accuracy
    from dsv4.testing.attention_kernel import AttentionKernels, config_of
    from dsv4.testing.harness import Simulator

    with AttentionWatch(keep=1) as watch:
        model.generate([prompt], max_new_tokens=2)
    inputs = watch.kept[-1].gathered().to("cpu")
    target = Simulator("sm_100a")
    kernels = AttentionKernels(target)
    call = kernels.call(inputs)
    outcome = target.simulate(kernels.compile(config_of(inputs)), call)
    report = outcome.report
    expected = watch.kept[-1].expected(rope=None).cpu()
    error = Accuracy.of(outcome["o"], expected).relative
    races = len(report.races)
    instructions = sum(launch.instructions for launch in report.launches)
    detail = f"relative error {error:.1e}, {races} races, {instructions} warp instructions"
    return Check(name, error <= BFLOAT16.relative and not races, detail)


def _loss(model: DeepseekV4, tokens: torch.Tensor) -> float:
    logits = model(tokens)[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
