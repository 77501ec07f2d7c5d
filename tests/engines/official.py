"""The forward pass that released folders ship (`inference/model.py`), run on a CPU.

Its file is executed as it is. Its kernels, which are TileLang, are written out here in plain torch
from `inference/kernel.py`, and share no code with this package: they are half of the opinion.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4.config.model_config import ModelConfig

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class OfficialModel:
    """Logits and MTP logits of the official forward.

    Args:
        folder: with `model.py`, of a released checkpoint or repository.
        config: of the checkpoint.
        tensors: by released names.
        max_seq_len: positions that its caches hold.
        dtype: of activations; the releases run in bfloat16.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        max_seq_len: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        self.module = _execute(folder / "model.py")
        with self._as_default():
            self.model = self.module.Transformer(self._arguments(config, max_seq_len))
            self._load(tensors)
        # It keeps the last position alone.
        head = self.model.head
        head.get_logits = lambda x: F.linear(x.float(), head.weight)

    def prefill(self, ids: Tensor) -> Tensor:
        """Logits [S, vocab] of ids [S], which fill its caches."""
        with self._as_default():
            return self.model(ids[None])[0].clone()

    def decode(self, ids: Tensor, start: int) -> Tensor:
        """Logits [n, vocab] of ids [n] that follow the first `start`, one by one."""
        with self._as_default():
            steps = [self.model(token.view(1, 1), start + i)[0] for i, token in enumerate(ids)]
        return torch.cat(steps)

    def mtp(self, ids: Tensor) -> Tensor:
        """Logits [S - 1, vocab] of the MTP block on the streams of ids [S]."""
        kept: list[Tensor] = []
        hook = self.model.layers[-1].register_forward_hook(lambda *call: kept.append(call[-1]))
        self.prefill(ids)
        hook.remove()
        with self._as_default():
            return self.model.mtp[0](kept[0][:, :-1], 0, ids[None, 1:])[0].clone()

    def _arguments(self, config: ModelConfig, max_seq_len: int) -> Any:
        scaling = config.rope_scaling
        return self.module.ModelArgs(
            max_batch_size=1,
            max_seq_len=max_seq_len,
            dtype="fp8",
            scale_fmt="ue8m0",
            expert_dtype="fp4",
            scale_dtype="fp8",
            vocab_size=config.vocab_size,
            dim=config.hidden_size,
            moe_inter_dim=config.moe_intermediate_size,
            n_layers=config.num_hidden_layers,
            n_hash_layers=config.num_hash_layers,
            n_mtp_layers=config.num_nextn_predict_layers,
            n_heads=config.num_attention_heads,
            n_routed_experts=config.n_routed_experts,
            n_activated_experts=config.num_experts_per_tok,
            route_scale=config.routed_scaling_factor,
            swiglu_limit=config.swiglu_limit,
            q_lora_rank=config.q_lora_rank,
            head_dim=config.head_dim,
            rope_head_dim=config.qk_rope_head_dim,
            norm_eps=config.rms_norm_eps,
            o_groups=config.o_groups,
            o_lora_rank=config.o_lora_rank,
            window_size=config.sliding_window,
            compress_ratios=(*config.compress_ratios, *(0,) * config.num_nextn_predict_layers),
            compress_rope_theta=config.compress_rope_theta,
            original_seq_len=scaling.original_max_position_embeddings,
            rope_theta=config.rope_theta,
            rope_factor=scaling.factor,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            index_n_heads=config.index_n_heads,
            index_head_dim=config.index_head_dim,
            index_topk=config.index_topk,
            hc_mult=config.hc_mult,
            hc_sinkhorn_iters=config.hc_sinkhorn_iters,
            hc_eps=config.hc_eps,
        )

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        """What its `convert.py` does: `wo_a` is decoded, FP4 codes get their dtype."""
        found = dict(tensors)
        for name in [name for name in found if name.endswith("wo_a.weight")]:
            scale = found.pop(name.replace("weight", "scale"))
            found[name] = _times_blocks(found[name].float(), scale.float(), 128, 128)
        expected = {name for name, _ in self.model.named_parameters()}
        # A block of MTP has embedding and head of the model.
        expected = {name for name in expected if not name.startswith(("mtp.0.embed", "mtp.0.head"))}
        if expected != found.keys():
            raise AssertionError(f"names differ: {sorted(expected ^ found.keys())[:8]}")
        for name, tensor in found.items():
            owner, _, key = name.rpartition(".")
            module = self.model.get_submodule(owner)
            if tensor.dtype == torch.int8:
                tensor = tensor.view(torch.float4_e2m1fn_x2)
            elif tensor.dtype in (torch.bfloat16, torch.float32):
                is_wide = module._parameters[key].dtype == torch.float32
                tensor = tensor.float() if is_wide else tensor.to(self.dtype)
            setattr(module, key, nn.Parameter(tensor, requires_grad=False))
        for module in self.model.modules():
            if isinstance(module, self.module.Linear) and module.scale is not None:
                module.weight.scale = module.scale

    @contextmanager
    def _as_default(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _execute(path: Path) -> ModuleType:
    """The file as a module, with the kernels below in place of those it imports."""
    kernel = ModuleType("kernel")
    for function in (act_quant, fp4_act_quant, fp8_gemm, fp4_gemm, sparse_attn, hc_split_sinkhorn):
        setattr(kernel, function.__name__, function)
    hadamard = ModuleType("fast_hadamard_transform")
    hadamard.hadamard_transform = hadamard_transform
    module = ModuleType("official_model")
    stand_ins = {"kernel": kernel, hadamard.__name__: hadamard, module.__name__: module}
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    # Without its assertions: one of them wants bfloat16.
    exec(compile(path.read_text(), str(path), "exec", optimize=1), vars(module))
    for name, previous in before.items():
        if name == hadamard.__name__:
            continue  # imported within a function
        sys.modules.pop(name) if previous is None else sys.modules.update({name: previous})
    return module


# ---- kernels -------------------------------------------------------------------------------------


def _power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """2^ceil(log2(amax / largest)), from the bits."""
    mantissa, exponent = torch.frexp(amax * torch.tensor(1 / largest, dtype=torch.float32))
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())


def act_quant(
    x: Tensor,
    block_size: int = 128,
    scale_fmt: str | None = None,
    scale_dtype: torch.dtype = torch.float32,
    inplace: bool = False,
) -> Any:
    """FP8 codes and scales of blocks, or x rounded to them in place."""
    blocks = x.float().unflatten(-1, (-1, block_size))
    scale = _power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4), 448.0)
    codes = (blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    if inplace:
        return x.copy_((codes.float() * scale).flatten(-2))
    return codes.flatten(-2), scale.squeeze(-1).to(scale_dtype)


def fp4_act_quant(x: Tensor, block_size: int = 32, inplace: bool = False) -> Tensor:
    """x rounded to FP4 in place: to the nearest value, ties to the one with an even code."""
    blocks = x.float().unflatten(-1, (-1, block_size))
    scale = _power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126), 6.0)
    scaled = blocks / scale
    values = torch.tensor(FP4_VALUES)
    distance = (scaled.abs().clamp(max=6.0).unsqueeze(-1) - values).abs()
    # Of two equally near ones, the even code: an odd one counts as a hair further away.
    odd = torch.arange(8) % 2 * 1e-6
    rounded = values[(distance + odd).argmin(-1)].copysign(scaled)
    return x.copy_((rounded * scale).flatten(-2))


def _times_blocks(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """Codes times the scale of their block; blocks at the edges may be cut."""
    wide = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return codes * wide[..., : codes.shape[-2], : codes.shape[-1]]


def fp8_gemm(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Of e4m3 codes, scales of 1 x 128 and 128 x 128."""
    left = _times_blocks(a.float(), a_s.float(), 1, 128)
    right = _times_blocks(b.float(), b_s.float(), 128, 128)
    return (left @ right.T).to(torch.get_default_dtype())


def fp4_gemm(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Of e4m3 and e2m1 codes, scales of 1 x 128 and 1 x 32; the low half of a byte comes first."""
    codes = b.view(torch.uint8)
    halves = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])[halves]
    left = _times_blocks(a.float(), a_s.float(), 1, 128)
    return (left @ _times_blocks(values, b_s.float(), 1, 32).T).to(torch.get_default_dtype())


def sparse_attn(
    q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, softmax_scale: float
) -> Tensor:
    """Attention of q [b, s, h, d] over the rows of kv [b, n, d] that its indices name."""
    chosen = topk_idxs.clamp(min=0).long()
    keys = torch.stack([rows[index] for rows, index in zip(kv.float(), chosen)])
    scores = torch.einsum("bshd,bskd->bshk", q.float(), keys) * softmax_scale
    scores = scores.masked_fill((topk_idxs < 0).unsqueeze(2), -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True) + (attn_sink.float()[:, None] - highest).exp()
    return (torch.einsum("bshk,bskd->bshd", weights.to(q.dtype).float(), keys) / total).to(q.dtype)


def hc_split_sinkhorn(
    mixes: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_mult: int, sinkhorn_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights before and after a sublayer, and the mixing of the streams: doubly stochastic."""
    n = hc_mult
    shifted = [
        part * scale + base
        for part, scale, base in zip(
            mixes.split((n, n, n * n), -1), hc_scale, hc_base.split((n, n, n * n))
        )
    ]
    comb = shifted[2].unflatten(-1, (n, n)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return shifted[0].sigmoid() + eps, 2 * shifted[1].sigmoid(), comb


def hadamard_transform(x: Tensor, scale: float) -> Tensor:
    """Product with the Sylvester matrix, by butterflies."""
    y, size = x.float(), x.shape[-1]
    step = 1
    while step < size:
        pairs = y.unflatten(-1, (-1, 2, step))
        y = torch.stack(
            (pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2
        )
        y = y.flatten(-3)
        step *= 2
    return (y * scale).to(x.dtype)
