"""The assembled DeepSeek-V4."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dsv4.cache.formats import KvFormat
from dsv4.cache.index_keys import check_index_format
from dsv4.cache.model_cache import ModelCache, block_size
from dsv4.cache.step import Step
from dsv4.config.model_config import ModelConfig
from dsv4.kernels.kit.index_entry import MODEL_FORMAT
from dsv4.layers.block import Block
from dsv4.layers.head import Embedding, best_of, logits_of
from dsv4.layers.hyper_connection import (
    HyperConnection,
    Streams,
    hyper_parameters,
    register_hyper_parameters,
)
from dsv4.layers.linear import Linear
from dsv4.layers.module import Module
from dsv4.layers.norm import RMSNorm
from dsv4.layers.reductions import full_precision_sums
from dsv4.model.mtp import MTPBlock
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsv4.engine.generate import GenerateResult

DEFAULT_PREFILL_CHUNK = 512
DEFAULT_MAX_REQUESTS = 32


class DeepseekV4(Module):
    """A complete DeepSeek-V4 for inference. Parameters are named as in the official checkpoints.

    Parameters are left uninitialised: `dsv4.load` fills them. Routed experts are stacked along a
    leading dimension; everything else has the checkpoint's shape. Norms, hyper-connections and
    sinks are fp32 whatever `dtype` is, as are the products of compressors and of the language-model
    head; `to(dtype)` converts what has the dtype of the activations alone: codes and scales are no
    numbers.

    Args:
        config: shapes, layer schedule and quantisation.
        dtype: of activations, caches and unquantised weights: bfloat16, or float32.
        device: where the parameters are created; "meta" costs no memory.
        kv_format, uniform_scale: how caches store keys, see `dsv4.cache.formats.KvFormat.of`.
        index_format: how caches of bfloat16 models store index keys that are rounded, "fp8" (132
            bytes) or "fp4" (68): the same entries are chosen.

    Raises:
        ValueError: there is no such `index_format`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        kv_format: str | None = None,
        uniform_scale: bool = False,
        index_format: str = MODEL_FORMAT,
    ) -> None:
        super().__init__()
        check_index_format(index_format)
        self.config = config
        self.kv_format = kv_format
        self.uniform_scale = uniform_scale
        self.index_format = index_format
        self.hyper = HyperConnection.of(config)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed = Embedding(vocab, hidden, dtype, device)
        self.head = Linear(hidden, vocab, dtype=dtype, is_wide=True, device=device)
        main = [spec for spec in config.schedule if not spec.is_mtp]
        drafts = [spec for spec in config.schedule if spec.is_mtp]
        self.layers = nn.ModuleList(Block(config, spec, dtype, device) for spec in main)
        self.mtp = nn.ModuleList(
            MTPBlock(config, spec, self.embed, self.head, dtype, device) for spec in drafts
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, device)
        register_hyper_parameters(
            self, "hc_head", config.hc_mult, config.hc_mult * hidden, 1, device
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, caches and unquantised weights."""
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.embed.weight.device

    def forward(self, input_ids: Tensor, *, chunk: int = 1024) -> Tensor:
        """Return the logits of whole sequences.

        Args:
            input_ids: [B, S] int64, every token valid, where the model is.
            chunk: tokens per request that are processed at once; bounds the memory in between.

        Returns:
            [B, S, vocab_size] fp32.

        Raises:
            TypeError: an argument is of another type; the message names it.
            ValueError: the ids have another shape, dtype or device, are not in the vocabulary, or
                exceed the model's context.
        """
        self._check_ids(input_ids)
        if isinstance(chunk, bool) or not isinstance(chunk, int):
            raise TypeError(f"chunk must be an integer, got {quoted(chunk)}")
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        batch, length = input_ids.shape
        tokens_per_block = block_size(self.config)
        blocks = -(-length // tokens_per_block)
        tokens = batch * min(chunk, length)
        cache = self.new_cache(batch, batch * blocks, blocks, max_tokens=tokens)
        rows = torch.arange(batch, device=self.device)
        table = torch.arange(batch * blocks, device=self.device).view(batch, blocks)
        logits = []
        for begin in range(0, length, chunk):
            ids = input_ids[:, begin : begin + chunk]
            size = ids.shape[1]
            step = Step(
                slots=rows,
                starts=torch.full_like(rows, begin),
                lens=torch.full_like(rows, size),
                block_table=table,
                chunk=size,
                capacity=tokens_per_block * -(-(begin + size) // tokens_per_block),
            )
            logits.append(self.outputs(self.unwritten_streams(ids, cache, step))[0])
        return torch.cat(logits, dim=1)

    def streams(self, input_ids: Tensor, cache: ModelCache, step: Step) -> Tensor:
        """Run the layers over the step's tokens and extend the cache.

        Args:
            input_ids: [B, C] int64; any id of the vocabulary where the step has padding.

        Returns:
            Final streams [B, C, hc_mult, hidden_size]; undefined for padding.
        """
        return self.hyper.written(self.unwritten_streams(input_ids, cache, step))

    @full_precision_sums
    def unwritten_streams(self, input_ids: Tensor, cache: ModelCache, step: Step) -> Streams:
        """`streams`, the last sublayer's output still to be written to them."""
        step = cache.prepared(step)
        streams = Streams(self.hyper.start(self.embed(input_ids)))
        for layer, layer_cache in zip(self.layers, cache.layers):
            streams = layer(streams, input_ids, layer_cache, step)
        return streams

    def logits(self, streams: Tensor) -> Tensor:
        """Return the logits of the next token, [B, C, vocab_size] fp32."""
        return self.outputs(Streams(streams))[0]

    @full_precision_sums
    def outputs(self, streams: Streams) -> tuple[Tensor, Tensor]:
        """Return `logits`, and the streams [B, C, hc_mult, hidden_size] as `streams` has them."""
        return logits_of(
            streams, self.hyper, hyper_parameters(self, "hc_head"), self.norm, self.head
        )

    @full_precision_sums
    def best(self, streams: Streams) -> tuple[Tensor, Tensor] | None:
        """Return the likeliest next tokens, as `best_of`."""
        return best_of(streams, self.hyper, hyper_parameters(self, "hc_head"), self.norm, self.head)

    def new_cache(
        self,
        max_requests: int,
        num_blocks: int,
        max_blocks_per_request: int,
        max_draft: int = 0,
        max_tokens: int = DEFAULT_PREFILL_CHUNK,
        batch_invariant: bool = False,
    ) -> ModelCache:
        """Return an empty cache in the model's formats, where its parameters are; `ModelCache`
        describes the arguments.

        Raises:
            ValueError: a size is out of range, or the model has no such `kv_format`.
        """
        options = (self.kv_format, self.uniform_scale)
        return ModelCache(
            self.config,
            max_requests,
            num_blocks,
            max_blocks_per_request,
            self.dtype,
            self.device,
            max_draft,
            max_tokens,
            KvFormat.of(self.config, self.dtype, self.device, *options),
            batch_invariant,
            self.index_format,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        num_draft_tokens: int = 0,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        max_requests: int = DEFAULT_MAX_REQUESTS,
        use_cuda_graphs: bool | None = None,
        batch_invariant: bool = False,
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> GenerateResult:
        """Continue prompts; `dsv4.engine.generate.generate` describes the arguments."""
        from dsv4.engine.generate import generate

        return generate(
            self,
            prompts,
            max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            logprobs=logprobs,
            seed=seed,
            eos_token_id=eos_token_id,
            num_draft_tokens=num_draft_tokens,
            prefill_chunk=prefill_chunk,
            max_requests=max_requests,
            use_cuda_graphs=use_cuda_graphs,
            batch_invariant=batch_invariant,
            on_tokens=on_tokens,
        )

    def _check_ids(self, input_ids: Tensor) -> None:
        if not isinstance(input_ids, Tensor):
            raise TypeError(f"input_ids must be a tensor, got {type(input_ids).__name__}")
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(
                "input_ids must be [B, S] with at least one token, got "
                f"{quoted(list(input_ids.shape))}"
            )
        if input_ids.dtype != torch.int64:
            raise ValueError(f"input_ids must be int64, got {input_ids.dtype}")
        if input_ids.device != self.device:
            raise ValueError(f"input_ids must be on {self.device}, got {input_ids.device}")
        longest = self.config.max_position_embeddings
        if input_ids.shape[1] > longest:
            raise ValueError(
                f"input_ids must have at most {longest} positions, got {input_ids.shape[1]}"
            )
        low, high = input_ids.aminmax()
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"input_ids must lie in 0 .. {self.config.vocab_size - 1}, "
                f"got {int(low)} .. {int(high)}"
            )
