"""transformers' DeepSeek-V4 on our attention operator: `attn_implementation="dsv4"`.

    from dsv4.integrations.transformers import register

    register()
    model = DeepseekV4ForCausalLM.from_pretrained(folder, attn_implementation="dsv4")

The model hands over its window and its compressed entries as one list of keys and says by a mask
what each token sees. Keys are gathered per token, the operator does the rest, for all three kinds
of layers. Caches, compressors and the indexer stay transformers'.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv4.compat.flash_mla import flash_mla_sparse_fwd
from dsv4.quoting import quoted

NAME = "dsv4"


def register() -> None:
    """Make `attn_implementation="dsv4"` known to transformers; doing it again changes nothing.

    Raises:
        ImportError: transformers is not installed, or has no registry of attention functions.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention function of transformers' interface, for `DeepseekV4Attention` alone.

    Args:
        module: the calling layer.
        query: [B, n_h, S, d] bfloat16, or float32.
        key: [B, 1, K, d], window keys, then compressed entries; the values are the same.
        attention_mask: [B, 1, S, K], 0 where a token sees a key and the dtype's minimum or -inf
            where not; None: every token sees every key.
        scaling: factor on q . k.
        s_aux: [n_h], logits of the sinks.

    Returns:
        [B, S, n_h, d], and None in place of the weights, which are never in memory.

    Raises:
        NotImplementedError: dropout, or weights are asked for.
        TypeError, ValueError: another model calls, or the mask is a bias; the message names it.
    """
    _check(module, query, key, dropout, s_aux, kwargs)
    batch, _, tokens, head_dim = query.shape
    indices = _visible(attention_mask, batch, tokens, key.shape[2], query.device)
    sinks = s_aux.detach().float()
    outputs = [
        flash_mla_sparse_fwd(
            q.transpose(0, 1),
            rows.transpose(0, 1),
            chosen.unsqueeze(1),
            scaling,
            d_v=head_dim,
            attn_sink=sinks,
            return_max_logits=False,
        )[0]
        for q, rows, chosen in zip(query, key, indices)
    ]
    return torch.stack(outputs), None


def _check(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    dropout: float,
    s_aux: Tensor | None,
    kwargs: dict[str, object],
) -> None:
    if type(module).__name__ != "DeepseekV4Attention" or s_aux is None:
        raise TypeError(
            f"attn_implementation: '{NAME}' serves DeepSeek-V4 alone, got {type(module).__name__}"
        )
    if key.shape[1] != 1:
        raise ValueError(f"key: got {key.shape[1]} heads, DeepSeek-V4 has 1")
    if query.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"query: got {query.dtype}, needs torch.bfloat16 or torch.float32")
    if dropout:
        raise NotImplementedError(f"dropout: got {dropout}, the operator has none")
    if kwargs.get("output_attentions"):
        raise NotImplementedError("output_attentions: the weights are never in memory")


def _visible(
    mask: Tensor | None, batch: int, tokens: int, keys: int, device: torch.device
) -> Tensor:
    """Return the keys that each token sees, [B, S, most] int32, -1 behind them."""
    if mask is None:
        every = torch.arange(keys, dtype=torch.int32, device=device)
        return every.expand(batch, tokens, keys)
    if mask.shape[-1] != keys or mask.shape[1] != 1:
        raise ValueError(f"attention_mask: got shape {quoted(mask.shape)}, needs [B, 1, S, {keys}]")
    mask = mask.squeeze(1).expand(batch, tokens, keys)
    seen = mask == 0
    if not (seen | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        raise ValueError("attention_mask: got a bias, needs 0 or -inf: the operator adds none")
    most = int(seen.sum(-1).max())
    order = seen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :most]
    return torch.where(seen.gather(-1, order), order, -1).to(torch.int32)
