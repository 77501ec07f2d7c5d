#!/usr/bin/env python3
"""Times the Hopper attention kernels of several source trees side by side.

    scripts/tools/attention_compare.py --tree before=../other --shape 64,128,1024,128 [--shape ...]
    scripts/tools/attention_compare.py --tree a=../a --tree b=../b --splits 4 --splits 6 --rounds 9

Machines of one kind differ by several percent, and one machine from minute to minute: only kernels
that take turns can be compared. This tree is "here"; `--tree NAME=FOLDER` adds one that holds
another `dsv4/`. Every kernel is compiled in a process of its own, checked against the oracle, and
timed by turns: medians of CUDA-graph replays that go through a gigabyte of inputs, after a rest.
"=" says that a kernel's output has the bits of the first one's, "~" that it has not. With
`--splits` each kernel runs with every number of splits given, else with what this tree chooses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from dsv4.bench.attention import (  # noqa: E402
    MAX_ERROR,
    SINK_MODE,
    described,
    relative_error,
)
from dsv4.bench.peers import Run  # noqa: E402
from dsv4.bench.shapes import HEAD_DIM, WINDOW, rotating_arguments  # noqa: E402
from dsv4.bench.timing import (  # noqa: E402
    MIN_REPLAY_CALLS,
    REST_SECONDS,
    capture,
    elapsed_microseconds,
)
from dsv4.cli.bench import SHAPE_FORMAT, parse_shape  # noqa: E402
from dsv4.kernels.attention import launch_plan  # noqa: E402
from dsv4.kernels.attention.config import FmhaConfig  # noqa: E402
from dsv4.ops.runtime.toolchain import CuteToolchain  # noqa: E402
from dsv4.testing.attention import Case  # noqa: E402

HERE = "here"
SHAPES = ((64, 128, 1024, 128), (256, 128, 1024, 128), (128, 64, 512, 128))
ROTATING_BYTES = 1e9
REPLAYS = 5  # of a turn
# Runs in the tree that is compiled: everything it imports is of that tree.
COMPILE = """
import sys
from pathlib import Path
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops.runtime import registry
from dsv4.ops.runtime.toolchain import CuteToolchain
heads, head_dim, window, sink_mode, causal, path = sys.argv[1:]
config = FmhaConfig(
    int(head_dim), int(heads), int(window), 1024, is_causal=causal == "True", sink_mode=sink_mode
)
if hasattr(registry, "runner_key"):  # a tree from before operators were declared
    key = registry.runner_key(config, "sm_90a")
else:
    key = registry.OPS["sparse_fmha_with_swa"].compile_key(config, "sm_90a")
CuteToolchain().export(registry.build(key), Path(path))
"""


def compile_all(
    trees: dict[str, Path], heads: list[int], folder: Path, is_causal: bool = False
) -> dict:
    """Runners by tree and heads; compiled at the same time."""
    jobs = {}
    for name, tree in trees.items():
        for count in heads:
            path = folder / f"{name}-{count}.o"
            numbers = [count, HEAD_DIM, WINDOW, SINK_MODE, is_causal, path]
            environment = os.environ | {
                "CUTE_DSL_ARCH": "sm_90a",
                "PYTHONPATH": f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            }
            jobs[name, count, path] = subprocess.Popen(
                [sys.executable, "-c", COMPILE, *map(str, numbers)],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
    runners = {}
    for (name, count, path), job in jobs.items():
        said, _ = job.communicate()
        if job.returncode:
            raise SystemExit(f"{name}: {count} heads do not compile:\n{said[-2000:]}")
        runners[name, count] = CuteToolchain().load(path)
    return runners


def make_call(runner, config: FmhaConfig, tokens: int, splits: int) -> Callable:
    """One launch on given inputs, with everything else at hand."""
    size = launch_plan.workspace_size(config, tokens, splits) if splits > 1 else 0
    # Twice as much as this tree needs: another one may need more.
    workspace = torch.zeros(2 * size, device="cuda")
    lengths = torch.empty(0, dtype=torch.int32, device="cuda")
    lse = torch.empty((0, config.num_query_heads), device="cuda")
    count = torch.cuda.get_device_properties(0).multi_processor_count
    return lambda inputs: runner(*inputs, lengths, lse, workspace, splits, count)


@torch.inference_mode()
def compare(case: Case, runners: dict, splits: list[int], rounds: int) -> dict[str, str]:
    """Microseconds of each kernel in a case, with a mark, by name."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    inputs = rotating_arguments(case, ROTATING_BYTES / cache)
    config = FmhaConfig(case.head_dim, case.heads, WINDOW, case.top_k, sink_mode=SINK_MODE)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    size = (case.tokens, case.top_k, case.window_rows, multiprocessors)
    graphs, marks, first = {}, {}, None
    kept = []  # A graph does not own what its launches read and write.
    for (name, heads), runner in runners.items():
        if heads != case.heads:
            continue
        for number in splits or [launch_plan.num_splits(config, *size)]:
            call = make_call(runner, config, case.tokens, number)
            for each in inputs:
                each.o.fill_(float("nan"))
                call(each)
            title = f"{name}, {number} splits"
            error = relative_error(Run(lambda: None, lambda: inputs[0].o), inputs[0])
            if not error <= MAX_ERROR or any(each.o.isnan().any() for each in inputs):
                raise SystemExit(f"{title}: wrong at {described(case)}, error {error:.1e}")
            outputs = [inputs[0].o.clone(), inputs[-1].o.clone()]
            first = first or outputs
            marks[title] = "=" if all(map(torch.equal, first, outputs)) else "~"
            calls = [partial(call, each) for each in inputs]
            kept.append(calls)
            graphs[title] = capture(calls, MIN_REPLAY_CALLS)
    times: dict[str, list[float]] = {title: [] for title in graphs}
    titles = list(graphs)
    for turn in range(rounds):
        for i in range(len(titles)):
            title = titles[(i + turn) % len(titles)]
            graph, count = graphs[title]
            torch.cuda.synchronize()
            time.sleep(REST_SECONDS)
            graph.replay()
            taken = statistics.median(elapsed_microseconds(graph.replay) for _ in range(REPLAYS))
            times[title].append(taken / count)
    return {title: f"{statistics.median(times[title]):.2f}{marks[title]}" for title in titles}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--shape", action="append", type=parse_shape, metavar=SHAPE_FORMAT)
    parser.add_argument("--splits", action="append", type=int, default=[])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each kernel")
    parser.add_argument(
        "--causal",
        action="store_true",
        help="the kernels of the causal window; every token is its request's last, so that it sees "
        "the same keys",
    )
    args = parser.parse_args()
    trees = {HERE: ROOT}
    for item in args.tree:
        name, _, folder = item.partition("=")
        if not (Path(folder) / "dsv4").is_dir() or name in trees:
            raise SystemExit(f"--tree: got {item!r}, needs NAME=FOLDER, and FOLDER/dsv4")
        trees[name] = Path(folder).resolve()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("needs a Hopper GPU: an H100 or H200")
    wanted = [Case.decode(*numbers) for numbers in args.shape or SHAPES]
    with tempfile.TemporaryDirectory() as folder:
        heads = sorted({case.heads for case in wanted})
        runners = compile_all(trees, heads, Path(folder), args.causal)
        for case in wanted:
            found = compare(case, runners, args.splits, args.rounds)
            torch.cuda.empty_cache()
            numbers = "  ".join(f"{title}: {value}" for title, value in found.items())
            print(f"T={case.tokens} {case.heads} heads {case.keys} keys  {numbers}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
