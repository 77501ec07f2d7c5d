"""The kernels of the package that `dsv4 sim` runs: what they are, and how to run them."""

from __future__ import annotations

from typing import NamedTuple


class SimulatedKernel(NamedTuple):
    """A kernel of an architecture; `command` reaches every synchronisation of it."""

    name: str
    arch: str
    serves: str
    command: str


_MIXED = "--form mixed"
_ATTENTION = "dsv4 sim attention --inputs mixed --top-k 600"
KERNELS = (
    SimulatedKernel(
        "attention, 1-CTA",
        "sm_100a",
        "sparse_fmha_with_swa, up to 64 heads, or head_dim below 512",
        f"{_ATTENTION} --heads 64 --head-dim 64",
    ),
    SimulatedKernel(
        "attention, 2-CTA",
        "sm_100a",
        "sparse_fmha_with_swa, more than 64 heads of head_dim 512",
        f"{_ATTENTION} --heads 72",
    ),
    SimulatedKernel(
        "attention, heads in M",
        "sm_90a",
        "sparse_fmha_with_swa, more than 24 heads",
        # Where columns are shared, and keys come late.
        "dsv4 sim attention --inputs mixed --top-k 300 --arch sm_90a --heads 72 --schedule lazy",
    ),
    SimulatedKernel(
        "attention, swap-AB",
        "sm_90a",
        "sparse_fmha_with_swa, up to 24 heads, or small launches of 32, 64 and 128",
        f"{_ATTENTION} --arch sm_90a --heads 24 --head-dim 64",
    ),
    *(
        SimulatedKernel(
            "RMSNorm with FP8 output",
            arch,
            "rms_norm_fp8, rows of up to 16,384 elements",
            f"dsv4 sim rms_norm_fp8 --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "FP8 linear",
            arch,
            "fp8_linear, every tiling",
            f"dsv4 sim fp8_linear --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "merged linear",
            arch,
            "merged_linear, every tiling",
            f"dsv4 sim merged_linear --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "grouped linear",
            arch,
            "grouped_linear, every tiling",
            f"dsv4 sim grouped_linear --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "plain linear",
            arch,
            "plain_linear, every tiling",
            f"dsv4 sim plain_linear --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "best rows of a linear",
            arch,
            "linear_argmax, every tiling",
            f"dsv4 sim linear_argmax --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    # Of so many columns that a CTA of the launch of parts leaves before all others have begun.
    *(
        SimulatedKernel(
            "mHC seam",
            arch,
            "mhc_seam, every number of tokens a pass",
            f"dsv4 sim mhc_seam --arch {arch} --dim 2560",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    SimulatedKernel(
        "paged attention, swap-AB",
        "sm_90a",
        "sparse_fmha_paged, rows, up to 24 heads",
        "dsv4 sim paged --arch sm_90a --head-dim 64",
    ),
    SimulatedKernel(
        "paged attention, heads in M",
        "sm_90a",
        "sparse_fmha_paged, rows, more than 24 heads",
        "dsv4 sim paged --arch sm_90a --heads 72",
    ),
    SimulatedKernel(
        "paged attention, codes",
        "sm_90a",
        "sparse_fmha_paged_fp8, rows, more than 24 heads",
        "dsv4 sim paged --arch sm_90a --heads 72 --codes",
    ),
    SimulatedKernel(
        "paged attention, 1 CTA",
        "sm_100a",
        "sparse_fmha_paged, rows, any number of heads",
        "dsv4 sim paged --arch sm_100a --head-dim 64",
    ),
    SimulatedKernel(
        "paged attention, 2 CTAs",
        "sm_100a",
        "sparse_fmha_paged, rows, head_dim 512 and more than 64 heads",
        "dsv4 sim paged --arch sm_100a --heads 72",
    ),
    # Hopper's heads in M over FP8 entries have a wait that no schedule makes them take: where it
    # is listed, `tests/simulator/races` says why.
    *(
        SimulatedKernel(
            f"paged FP8 attention, {variant}",
            arch,
            f"sparse_fmha_paged, FP8 entries, {which}",
            f"dsv4 sim paged --arch {arch} --format fp8 {options}",
        )
        for variant, arch, which, options in (
            ("swap-AB", "sm_90a", "up to 24 heads", "--heads 16"),
            ("1 CTA", "sm_100a", "up to 64 heads", f"--heads 16 {_MIXED}"),
            ("2 CTAs", "sm_100a", "more than 64 heads", f"--heads 72 {_MIXED}"),
        )
    ),
    *(
        SimulatedKernel(
            "insertion into pages",
            arch,
            "kv_insert, rows and FP8 entries",
            f"dsv4 sim kv_insert --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "indexer",
            arch,
            "index_topk: scores of FP8 keys, and the choice",
            f"dsv4 sim index_topk --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "compressor",
            arch,
            "compress: every kind of compressor, state, mean and entry",
            f"dsv4 sim compress --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "rows of latents",
            arch,
            "latent_rows: norms, keys of the window and compressors in one launch",
            f"dsv4 sim latent_rows --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "indices of a step",
            arch,
            "step_indices: what all layers derive from requests",
            f"dsv4 sim step_indices --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "sampler",
            arch,
            "sample_tokens, with and without top_k, top_p and min_p",
            f"dsv4 sim sample_tokens --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "quantised attention",
            arch,
            "quantized_attention: scores and values of every format; quantize_kv; dshb_to_bhsd",
            f"dsv4 sim lowp --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
    *(
        SimulatedKernel(
            "mixture of experts",
            arch,
            "moe: router, sort, experts, sum; every tiling",
            f"dsv4 sim moe --arch {arch}",
        )
        for arch in ("sm_100a", "sm_90a")
    ),
)


def print_kernels() -> None:
    """All kernels, each with the command that reaches every synchronisation of it."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("kernel", "architecture", "serves")
    for kernel in KERNELS:
        table.add_row(kernel.name, kernel.arch, kernel.serves)
    console.print(table)
    console.print("All synchronisation checked for races, no GPU needed:")
    for kernel in KERNELS:
        console.print(f"  {kernel.command}", soft_wrap=True, highlight=False)
