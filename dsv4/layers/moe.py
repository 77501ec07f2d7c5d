"""Mixture of experts: routed experts plus one that every token uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4.kernels.moe.config import BF16_DTYPES
from dsv4.kernels.moe.routing import MOST_ROUTED
from dsv4.layers.experts import Experts, SharedExpert
from dsv4.layers.linear import Rounded
from dsv4.layers.module import Module
from dsv4.layers.router import Router
from dsv4.ops.moe.forms import prepared_forms, rounds_to_nvfp4
from dsv4.ops.moe.op import FORMS, moe
from dsv4.ops.moe.rows import ExpertRows
from dsv4.ops.moe.weights import (
    GatedWeights,
    choose_form,
    has_row_scales,
    prepare_,
    restore_,
    restored,
)

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig

MAX_STATIC_CHUNK = 16
"""Longest chunk that is routed without reading the routing back: decode and draft verification."""
RELEASED = "released"


class MoE(Module):
    """The feed-forward part of a layer.

    Weights are kept as released until a GPU with kernels is to read them: `prepare` then
    brings them into the kernels' order, in place. What leaves the module is as released:
    `state_dict` gives restored copies of prepared tensors.

    Attributes:
        form: "released", or the form of the prepared weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.block = config.fp8_block
        self.form = RELEASED
        self.gate = Router(config, spec, dtype, device)
        # NVIDIA requantised the experts of main layers alone.
        is_fp4 = config.expert_scheme == "nvfp4" and spec.is_mtp
        scheme = "fp4" if is_fp4 else config.expert_scheme
        self.experts = Experts(config, scheme=scheme, dtype=dtype, device=device)
        self.shared_experts = SharedExpert(config, dtype, device)
        self.register_state_dict_post_hook(_release_copies)
        self.register_load_state_dict_pre_hook(_release_weights)

    def forward(
        self,
        x: Tensor | Rounded,
        input_ids: Tensor,
        live_tokens: Tensor | None = None,
        *,
        combine: bool = True,
    ) -> Tensor | ExpertRows:
        """Apply to tokens `x` [B, C, hidden_size] with ids [B, C]; summed in fp32.

        Args:
            live_tokens: [1] int32: the tokens behind the first so many are padding, for which no
                expert is read.
            combine: False where the reader takes rows that are still to be added, too.
        """
        codes = scale = None
        if isinstance(x, Rounded):
            x, codes, scale = x
        if self.form == RELEASED and x.is_cuda:
            self.prepare()
        experts = self.experts.weights
        if experts.rounds_to_nvfp4 and not rounds_to_nvfp4(self.form, x):
            experts = experts.without_input_scales()
        y = moe(
            x.flatten(0, 1), self.gate.weight, experts, self.shared_experts.weights,
            top_k=self.gate.topk, scaling=self.gate.scaling, limit=self.limit, form=self.form,
            block=self.block, live_tokens=live_tokens, combine=combine,
            x_codes=codes, x_scale=scale,
            **self.gate.choice(input_ids.flatten().contiguous()),
        )  # fmt: skip
        return y if isinstance(y, ExpertRows) else y.view_as(x)

    def takes_codes(self, tokens: int) -> bool:
        """Whether FP8 codes of so many tokens are of use, beside the tokens themselves."""
        reads = self.experts.weights.dtype_name not in BF16_DTYPES
        return reads and self.form in FORMS["sm_90a"] and tokens <= MOST_ROUTED

    def prepare(self) -> None:
        """Bring the weights into the order of this device's kernels, where it has some for them.

        Reads scales back and rewrites the weights: before graphs are captured.
        """
        experts, shared = self.experts.weights, self.shared_experts.weights
        if self.form != RELEASED:
            return
        forms = prepared_forms(self.gate.weight, experts, shared, self.block, self.gate.topk)
        if not forms:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "moe: the experts' weights are not prepared and a CUDA graph is being captured; "
                "run the layer once before the capture"
            )
        self.experts.join_scales_()
        form = choose_form(experts, forms)
        for weights in (experts, shared):
            prepare_(weights, form)
        self.form = form

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        # Plain weights follow a conversion to a dtype that no kernel takes.
        if self.experts.w1.plain:
            self.release()
        return super()._apply(fn, recurse)

    def release(self) -> None:
        """Invert `prepare`."""
        if self.form != RELEASED:
            for weights in (self.experts.weights, self.shared_experts.weights):
                restore_(weights, self.form)
            self.form = RELEASED


def _release_copies(module: MoE, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace prepared tensors of a state dict with restored copies."""
    if module.form == RELEASED:
        return
    for name, weights in _units(module):
        for matrix, codes, scale in zip(("w1", "w3", "w2"), weights.codes, weights.scales):
            stem = f"{prefix}{name}.{matrix}"
            state[f"{stem}.weight"] = restored(codes, module.form, is_scale=False)
            if has_row_scales(codes):
                part = "scale" if codes.dtype == torch.int8 else "weight_scale"
                state[f"{stem}.{part}"] = restored(scale, module.form, is_scale=True)


def _release_weights(module: MoE, *_: Any) -> None:
    """A state dict is loaded into released weights."""
    module.release()


def _units(module: MoE) -> tuple[tuple[str, GatedWeights], ...]:
    return (
        ("experts", module.experts.weights),
        ("shared_experts", module.shared_experts.weights),
    )
