"""Other packages' routed experts, with random weights of the same sizes.

All are less than a layer: experts of each token are given, and neither the router nor the shared
expert is in them. Results are not compared with ours: each has weights in an order of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4.bench import packages
from dsv4.kernels.moe.layer_config import MoeConfig

Call = Callable[[], object]
FP4_GROUP, FP8_BLOCK = 32, 128
FEWEST_EXPONENT, MOST_EXPONENT = 117, 123  # of scales
SMALL_SCALE = 2.0**-9  # of FP8 codes, which are up to 448
# vLLM's name of e2m1 weights, and how full Marlin's blocks of an expert's pairs are at most.
MARLIN_E2M1 = 562949953487106
MARLIN_BLOCKS, MARLIN_FILL = (8, 16, 32, 48, 64), 0.9
MASKED_ROWS = 64  # of DeepGEMM's experts: a multiple of them
NAMES = ("torch", "DeepGEMM", "Marlin", "Humming W4A8", "Humming W4A16")


class Peer(Protocol):
    """Routed experts of a configuration, on a device."""

    def call(self, x: Tensor, ids: Tensor) -> Call:
        """A call for tokens x [T, D] with experts ids [T, k]."""
        ...


class Lists(NamedTuple):
    """Pairs of token and slot by expert, in blocks, as vLLM's kernels take them."""

    pairs: Tensor
    experts: Tensor
    padded: Tensor


def find(
    vllm: Path | None = None, humming: Path | None = None
) -> Iterator[tuple[str, Callable[[MoeConfig, str], Peer]]]:
    """Names and makers of those of this installation.

    Args:
        vllm: folder `vllm` of a vLLM wheel, which has Marlin and DeepGEMM.
        humming: folder that has the package `humming`, whose tokens vLLM's operators sort.

    Raises:
        ValueError: a folder is given and cannot be used.
    """
    if humming is not None and vllm is None:
        raise ValueError("humming: vllm is not given, whose operators sort its tokens")
    yield "torch", GroupedProducts
    library = packages.deep_gemm(vllm)
    if library is not None:
        yield "DeepGEMM", partial(DeepGemm, library)
    if vllm is not None:
        packages.vllm_operators(vllm)
        yield "Marlin", Marlin
        if packages.humming(humming) is not None:
            yield "Humming W4A8", partial(Humming, True)
            yield "Humming W4A16", partial(Humming, False)


class GroupedProducts:
    """torch's grouped products of the routed experts, both, with FP8 weights and a scale a row.

    Tokens are sorted and rounded beforehand. Weights have twice the bytes of FP4.
    """

    def __init__(self, config: MoeConfig, device: str = "cuda") -> None:
        self.config, self.device = config, device
        self.weights = [
            fp8_codes((config.experts, *size), device) for size in _products(config).values()
        ]
        self.call(*_one_token(config, device))()
        if device == "cuda":
            torch.cuda.synchronize()

    def call(self, x: Tensor, ids: Tensor) -> Call:
        config, pairs = self.config, ids.numel()
        counts = ids.flatten().long().bincount(minlength=config.experts)
        ends = counts.cumsum(0).int()
        scale = torch.full((pairs,), SMALL_SCALE, device=self.device)
        inputs = [
            torch.randn(pairs, width, device=self.device).to(torch.float8_e4m3fn)
            for width in (config.hidden, config.inner)
        ]
        scales = [torch.full(w.shape[:2], SMALL_SCALE, device=self.device) for w in self.weights]

        def products() -> None:
            for codes, weight, of_rows in zip(inputs, self.weights, scales):
                torch._scaled_grouped_mm(
                    codes, weight.mT, scale, of_rows, offs=ends, out_dtype=torch.bfloat16
                )

        return products


class DeepGemm:
    """DeepGEMM's products of the routed experts, both, with FP8 weights, a scale a block, and each
    expert's tokens in a place of its own, where they are rounded beforehand."""

    def __init__(self, library: ModuleType, config: MoeConfig, device: str = "cuda") -> None:
        self.library, self.config, self.device = library, config, device
        self.weights = []
        for rows, width in _products(config).values():
            codes = fp8_codes((config.experts, rows, width), device)
            shape = config.experts, rows // FP8_BLOCK, width // FP8_BLOCK
            self.weights.append((codes, torch.full(shape, SMALL_SCALE, device=device)))
        self.places: dict[int, list[tuple[tuple[Tensor, Tensor], Tensor]]] = {}

    def call(self, x: Tensor, ids: Tensor) -> Call:
        config = self.config
        counts = ids.flatten().long().bincount(minlength=config.experts).int()
        rows = -(-int(counts.max()) // MASKED_ROWS) * MASKED_ROWS
        if rows not in self.places:
            self.places[rows] = [self._places(rows, *size) for size in _products(config).values()]
        expected = max(1, round(ids.numel() / config.experts))

        def products() -> None:
            for (inputs, out), weight in zip(self.places[rows], self.weights):
                self.library.m_grouped_fp8_gemm_nt_masked(
                    inputs, weight, out, counts, expected, disable_ue8m0_cast=True
                )

        return products

    def _places(self, rows: int, features: int, width: int):
        experts, options = self.config.experts, {"device": self.device}
        codes = fp8_codes((experts, rows, width), self.device)
        scale = torch.full((experts, width // FP8_BLOCK, rows), SMALL_SCALE, **options).mT
        out = torch.empty(experts, rows, features, dtype=torch.bfloat16, **options)
        return (codes, scale), out


class Marlin:
    """vLLM's FP4 experts with bf16 activations: lists, products, SwiGLU, sum."""

    def __init__(self, config: MoeConfig, device: str = "cuda") -> None:
        self.config, self.device = config, device
        self.weights, self.scales = [], []
        for rows, width in _products(config).values():
            shape = config.experts, width // 16, 2 * rows
            words = torch.empty(shape, dtype=torch.int32, device=device)
            self.weights.append(words.random_(-(2**31), 2**31 - 1))
            shape = config.experts, width // FP4_GROUP, rows
            self.scales.append(_exponents(shape, device))
        places = 4 * torch.cuda.get_device_properties(device).multi_processor_count
        self.workspace = torch.zeros(places, dtype=torch.int32, device=device)

    def call(self, x: Tensor, ids: Tensor) -> Call:
        config, (tokens, k) = self.config, ids.shape
        fill = ids.numel() / config.experts
        blocks = [block for block in MARLIN_BLOCKS if fill / block < MARLIN_FILL]
        block = blocks[0] if blocks else MARLIN_BLOCKS[-1]
        factors = torch.full((tokens, k), 1 / k, device=self.device)
        options = {"dtype": torch.bfloat16, "device": self.device}
        gated = torch.empty(ids.numel(), 2 * config.inner, **options)
        h = torch.empty(ids.numel(), config.inner, **options)
        rows = torch.empty(ids.numel(), config.hidden, **options)
        y = torch.empty(tokens, config.hidden, **options)

        def product(place: int, a: Tensor, out: Tensor, lists: Lists, slots: int) -> None:
            width, features = a.shape[1], out.shape[1]
            torch.ops._moe_C.moe_wna16_marlin_gemm(
                a, out, self.weights[place], None, self.scales[place], None, None, None,
                self.workspace, lists.pairs, lists.experts, lists.padded, factors, block, slots,
                slots == 1, MARLIN_E2M1, a.shape[0], features, width, False, True, False, -1, -1,
                -1,
            )  # fmt: skip

        def experts() -> None:
            lists = lists_of(ids, config.experts, block)
            product(0, x, gated, lists, k)
            torch.ops._C.silu_and_mul_with_clamp(h, gated, config.limit, 1.0, 0.0)
            product(1, h, rows, lists, 1)
            torch.ops._moe_C.moe_sum(rows.view(tokens, k, -1), y, None, None)

        return experts


class Humming:
    """Humming's FP4 experts, vLLM's default on Hopper: lists, rounding, products, SwiGLU, sum.

    Args:
        rounds: whether activations are in e4m3, per 128; else they are in bf16.
    """

    COMPUTE = json.dumps(
        {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}
    )

    def __init__(self, rounds: bool, config: MoeConfig, device: str = "cuda") -> None:
        self.rounds, self.config, self.device = rounds, config, device
        self.layers = [self._layer(*size) for size in _products(config).values()]
        self.activation = {
            "activation_type": "binary_split",
            "activation_impl": f"""[](float a, float b) {{
                const float gate = fminf(a, {config.limit}f);
                const float up = fmaxf(fminf(b, {config.limit}f), -{config.limit}f);
                return gate / (1.f + expf(-gate)) * up; }}(a, b)""",
        }

    def _layer(self, rows: int, width: int) -> Any:
        from humming.layer import HummingLayer

        rounded = {
            "quant_method": "humming", "dtype": "float8e4m3", "group_size": FP8_BLOCK,
            "scale_dtype": "float32", "quant_mode": "dynamic_group",
        }  # fmt: skip
        with torch.device(self.device):
            layer = HummingLayer(
                shape_n=rows, shape_k=width, weight_config={"quant_method": "mxfp4"},
                input_config=rounded if self.rounds else None, pad_n_to_multiple=256,
                pad_k_to_multiple=128, num_experts=self.config.experts,
                torch_dtype=torch.bfloat16,
            )  # fmt: skip
        layer = layer.to(self.device)
        layer.weight.data.random_(0, 256)
        layer.weight_scale.data.random_(FEWEST_EXPONENT, MOST_EXPONENT)
        layer.transform()
        return layer

    def _tuning(self, layer: Any, pairs: int) -> tuple[str, int]:
        """Of a product of so many pairs, and the pairs of a block."""
        from humming.config import GemmType
        from humming.tune import get_heuristics_config

        found = get_heuristics_config(
            layer_config=layer.humming_config, use_f16_accum=False, use_batch_invariant=False,
            gemm_type=GemmType.INDEXED,
        )  # fmt: skip
        own = next(entry for low, high, entry in found if low < pairs <= (high or pairs))
        return json.dumps(own), own["block_shape"][0]

    def call(self, x: Tensor, ids: Tensor) -> Call:
        from humming.forward import may_process_input

        config, (tokens, k), pairs = self.config, ids.shape, ids.numel()
        tunings = [self._tuning(layer, pairs) for layer in self.layers]
        bf16 = {"dtype": torch.bfloat16, "device": self.device}
        operand = {"dtype": torch.float8_e4m3fn if self.rounds else torch.bfloat16}
        codes = torch.empty(tokens, config.hidden, device=self.device, **operand)
        h = torch.empty(pairs, config.inner, device=self.device, **operand)
        gated = torch.empty(pairs, 2 * config.inner, **bf16)
        rows = torch.empty(pairs, config.hidden, **bf16)
        y = torch.empty(tokens, 1, config.hidden, **bf16)
        factors = torch.full((tokens, 1, k), 1 / k, **bf16)

        def rounded(layer: Any, given: Tensor, out: Tensor, **activation: str):
            of_layer = layer.humming_config
            values, by_group, by_token = may_process_input(
                of_layer, inputs=given, outputs=out, layout="normal", **activation
            )
            return values, by_group if of_layer.input_quant_mode.has_group_scale else by_token

        def product(place: int, given: tuple, out: Tensor, lists: Lists, slots: int) -> None:
            self.layers[place](
                given[0], outputs=out, input_scale=given[1], sorted_ids=lists.pairs,
                expert_ids=lists.experts, num_tokens_padded=lists.padded, top_k=slots,
                valid_shape_m=pairs, compute_config=self.COMPUTE, tuning_config=tunings[place][0],
            )  # fmt: skip

        def experts() -> None:
            blocks = [block for _, block in tunings]
            first = lists_of(ids, config.experts, blocks[0])
            given = rounded(self.layers[0], x, codes) if self.rounds else (x, None)
            product(0, given, gated, first, k)
            given = rounded(self.layers[1], gated, h, **self.activation)
            same = blocks[0] == blocks[1]
            second = first if same else lists_of(ids, config.experts, blocks[1])
            product(1, given, rows, second, 1)
            torch.bmm(factors, rows.view(tokens, k, -1), out=y)

        return experts


def lists_of(ids: Tensor, experts: int, block: int) -> Lists:
    """By vLLM's operator, which pads each expert's pairs to whole blocks."""
    pairs = ids.numel()
    most = min(pairs + experts * (block - 1), pairs * block)
    options = {"dtype": torch.int32, "device": ids.device}
    lists = Lists(
        torch.empty(most, **options), torch.empty(math.ceil(most / block), **options),
        torch.empty(1, **options),
    )  # fmt: skip
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, *lists, None, None)
    return lists


def fp8_codes(shape: tuple[int, ...], device: str) -> Tensor:
    """Codes of finite values, any."""
    codes = torch.empty(shape, dtype=torch.uint8, device=device)
    return codes.random_(0, 0x60).view(torch.float8_e4m3fn)


def _products(config: MoeConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of an expert's weights, gate and up together."""
    return {
        "gate and up": (2 * config.inner, config.hidden),
        "down": (config.hidden, config.inner),
    }


def _exponents(shape: tuple[int, ...], device: str) -> Tensor:
    found = torch.empty(shape, dtype=torch.uint8, device=device)
    found.random_(FEWEST_EXPONENT, MOST_EXPONENT)
    return found.view(torch.float8_e8m0fnu)


def _one_token(config: MoeConfig, device: str) -> tuple[Tensor, Tensor]:
    ids = torch.zeros((1, config.top_k), dtype=torch.int32, device=device)
    return torch.zeros(1, config.hidden, dtype=torch.bfloat16, device=device), ids
