"""A model of random weights, of the released shapes, and a cache of random keys.

What does not fit on the GPU shares the experts of layers that do: a step then reads as many bytes
in the same order, and between two uses of one expert lie those of all other layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dsv4.cache.formats import KeyPool
from dsv4.cache.index_keys import IndexKeyPool
from dsv4.cache.model_cache import ModelCache, block_size
from dsv4.config.model_config import ModelConfig
from dsv4.engine.memory_plan import MemoryPlan
from dsv4.layers.rope import Rope
from dsv4.loader import inventory
from dsv4.model.model import DeepseekV4

MODELS: dict[str, Callable[[], ModelConfig]] = {
    "flash": ModelConfig.flash,
    "pro": ModelConfig.pro,
}
CODE_EXPONENT = {torch.int8: 1.5, torch.float8_e4m3fn: 0.0}  # log2 of the size of random codes
E8M0_BIAS = 127
PATTERNS = 64  # different pages of a pool: more would only take longer to make
PAGES_AT_ONCE = 4096
MIN_REUSE = 10**9  # bytes of other reads between two uses of shared experts: many times an L2 cache


@dataclass(frozen=True)
class RandomModel:
    """A model whose last layers may share the experts of its first ones.

    Attributes:
        expert_sets: layers with experts of their own; layer i has those of i mod expert_sets.
    """

    model: DeepseekV4
    expert_sets: int

    @property
    def aliased_layers(self) -> int:
        """Layers that share experts with an earlier one."""
        return max(0, self.model.config.num_hidden_layers - self.expert_sets)


def truncated(config: ModelConfig, layers: int | None, has_drafts: bool) -> ModelConfig:
    """The first `layers` layers of a model (default all), with or without its draft layer."""
    count = config.num_hidden_layers if layers is None else layers
    if not 1 <= count <= config.num_hidden_layers:
        raise ValueError(f"layers: got {count}, the model has {config.num_hidden_layers}")
    return replace(
        config,
        num_hidden_layers=count,
        compress_ratios=config.compress_ratios[:count],
        layer_types=config.layer_types[:count],
        num_hash_layers=min(config.num_hash_layers, count),
        num_nextn_predict_layers=config.num_nextn_predict_layers if has_drafts else 0,
    )


def fitting_sets(config: ModelConfig, plan: MemoryPlan, room: int) -> int:
    """Layers whose experts fit beside everything else in `room` bytes; at most all.

    Args:
        plan: of the whole model, every layer with experts of its own.

    Raises:
        ValueError: not even one layer's experts fit.
    """
    stem, layers = "layers.0.ffn.", config.num_hidden_layers
    of_experts = sum(
        spec.nbytes
        for name, spec in inventory(config).items()
        if name.startswith(stem) and "experts." in name
    )
    others = plan.total - layers * of_experts
    sets = (room - others) // of_experts
    if sets < 1:
        raise ValueError(
            f"one layer's experts, everything else and a cache of {plan.cache / 1e9:.1f} GB take "
            f"{(others + of_experts) / 1e9:.1f} GB, the GPU has {room / 1e9:.1f} GB"
        )
    return min(int(sets), layers)


def reuse_bytes(config: ModelConfig, sets: int) -> int:
    """Bytes that a step of one token reads from one use of a layer's experts to the next, where
    layers share those of `sets` layers: of the attention of a window, which is the least."""
    layer = config.schedule[0].prefix
    found = {name: x for name, x in inventory(config).items() if name.startswith(f"{layer}.")}
    routed = sum(x.nbytes for name, x in found.items() if ".experts." in name)
    used = routed * config.num_experts_per_tok // config.n_routed_experts
    return sets * (sum(x.nbytes for x in found.values()) - routed + used)


def check_reuse(config: ModelConfig, sets: int) -> None:
    """Refuse to share experts that the L2 cache may still hold when they are read again."""
    apart = reuse_bytes(config, sets)
    if sets < config.num_hidden_layers and apart < MIN_REUSE:
        raise ValueError(
            f"experts of {sets} layers fit, which would be read again after {apart / 1e9:.2f} GB "
            f"of others, needs {MIN_REUSE / 1e9:.0f} GB: take fewer requests, a shorter context, "
            f"or --layers {sets}"
        )


def fitting_model(
    config: ModelConfig, plans: Sequence[MemoryPlan], is_aliased: bool
) -> RandomModel:
    """A model on the GPU, with as many experts of its own as fit beside the largest of `plans`.

    Args:
        is_aliased: let layers share experts where they do not fit.

    Raises:
        ValueError: they do not fit, or only few; the message says how much is missing.
    """
    plan = max(plans, key=lambda plan: plan.total)
    room, _ = torch.cuda.mem_get_info()
    sets = fitting_sets(config, plan, room)
    if sets < config.num_hidden_layers and not is_aliased:
        raise ValueError(
            f"{room / 1e9:.0f} GB hold the experts of {sets} of {config.num_hidden_layers} layers "
            f"beside a cache of {plan.cache / 1e9:.1f} GB: share experts (--alias-experts) or take "
            f"--layers {sets}"
        )
    check_reuse(config, sets)
    with torch.no_grad():
        return random_model(config, sets, torch.device("cuda"))


def random_model(config: ModelConfig, expert_sets: int, device: torch.device) -> RandomModel:
    """Make the model on `device`, its weights prepared for the kernels there."""
    model = DeepseekV4(config, device="meta")
    for index, layer in enumerate(model.layers):
        if index >= expert_sets:
            source = model.layers[index % expert_sets].ffn
            layer.ffn.experts, layer.ffn.shared_experts = source.experts, source.shared_experts
        _materialise(layer, device, config.n_routed_experts)
        if index < expert_sets:
            layer.ffn.prepare()
        else:
            layer.ffn.form = model.layers[index % expert_sets].ffn.form
    _materialise(model, device, config.n_routed_experts)
    return RandomModel(model, expert_sets)


def _materialise(root: nn.Module, device: torch.device, experts: int) -> None:
    """Give every parameter that has no memory yet random contents of a size that stays finite."""
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type != "meta":
                continue
            made = torch.empty_like(parameter, device=device)
            if name == "tid2eid":
                _distinct_choices(made, experts)
            else:
                _fill(made, name, _inputs(module))
            setattr(module, name, nn.Parameter(made, requires_grad=False))


def _inputs(module: nn.Module) -> tuple[int, torch.dtype]:
    """Input features of a module's weight, and its dtype."""
    weight = getattr(module, "weight", None)
    if weight is None:
        return 1, torch.float32
    return weight.shape[-1] * (2 if weight.dtype == torch.int8 else 1), weight.dtype


def _fill(made: Tensor, name: str, of_weight: tuple[int, torch.dtype]) -> None:
    """Random contents by dtype, shape and name: outputs of a linear are about as large as its
    inputs."""
    inputs, dtype = of_weight
    if made.dtype == torch.float8_e8m0fnu or (name == "scale" and made.dim() > 1):
        exponent = -round(math.log2(inputs) / 2 + CODE_EXPONENT[dtype])
        if made.dtype == torch.float32:
            made.fill_(2.0**exponent)
        else:
            made.view(torch.uint8).fill_(E8M0_BIAS + exponent)
    elif made.dtype == torch.int8:
        made.random_(-128, 128)
    elif made.dtype == torch.float8_e4m3fn:
        made.copy_(torch.randn(made.shape, dtype=torch.bfloat16, device=made.device))
    elif name.endswith(("base", "bias", "attn_sink")):
        made.zero_()
    elif made.dim() == 1:
        made.fill_(0.1 if name.endswith("scale") else 1.0)
    else:
        made.normal_(std=made.shape[-1] ** -0.5)


def _distinct_choices(table: Tensor, experts: int) -> None:
    """Rows of different expert ids out of an even number, each expert equally often."""
    rows, k = table.shape
    begin = torch.randint(experts, (rows, 1), device=table.device)
    stride = 2 * torch.randint(experts // 2, (rows, 1), device=table.device) + 1
    table.copy_((begin + stride * torch.arange(k, device=table.device)) % experts)


def random_cache(
    model: DeepseekV4,
    requests: int,
    context: int,
    drafts: int,
    chunk: int = 0,
    batch_invariant: bool = False,
) -> ModelCache:
    """A cache for so many requests of so many tokens, every key random and finite.

    Args:
        chunk: tokens of a prefill step; 0: there is none.
        batch_invariant: as in `ModelCache`.
    """
    blocks = -(-context // block_size(model.config)) + 1
    sizes = (requests, requests * blocks, blocks)
    options = {"max_draft": drafts, "max_tokens": chunk, "batch_invariant": batch_invariant}
    cache = model.new_cache(*sizes, **options)
    for spec, layer in zip(model.config.schedule, cache.layers, strict=True):
        rope = Rope.of_layer(model.config, spec)
        for pool in (layer.window, layer.entries):
            if pool is not None:
                _fill_pool(pool, rope)
        if layer.index_keys is not None:
            _fill_index_keys(layer.index_keys, model.config.index_head_dim)
    return cache


def _fill_pool(pool: KeyPool, rope: Rope) -> None:
    """Repeat few random pages all over a pool."""
    device, pages = pool.data.device, min(PATTERNS, pool.pages)
    few = KeyPool(pool.format, pages, pool.size, device)
    count, dim = pages * pool.size, pool.format.head_dim
    latents = torch.randn(count, dim, device=device, dtype=torch.bfloat16)
    places = torch.arange(count, dtype=torch.int32, device=device)
    weight = torch.ones(dim, device=device)
    few.insert(latents, weight, 1e-6, rope.table(count, device), places, places)
    _repeat(few.data, pool.data)


def _fill_index_keys(pool: IndexKeyPool, dim: int) -> None:
    pages, size = pool.data.shape[:2]
    few_pages = min(PATTERNS, pages)
    dtype, device = torch.bfloat16, pool.data.device
    few = IndexKeyPool(few_pages, size, dim, dtype, pool.is_packed, device, pool.key_format)
    keys = torch.randn(few_pages * size, dim, dtype=dtype, device=device)
    few.insert(keys, torch.arange(len(keys), dtype=torch.int32, device=device))
    _repeat(few.data, pool.data)


def _repeat(few: Tensor, many: Tensor) -> None:
    """Fill pages with copies of few, in random order."""
    for begin in range(0, len(many), PAGES_AT_ONCE):
        part = many[begin : begin + PAGES_AT_ONCE]
        part.copy_(few[torch.randint(len(few), (len(part),), device=many.device)])
