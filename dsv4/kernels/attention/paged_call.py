"""Call of a compiled paged attention kernel, the same on every architecture."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.paged_args import fake_arguments
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_plan import always_rounds_rows, has_kernel, rounds_rows
from dsv4.kernels.gemm.config import K_BLOCK, TERMS
from dsv4.kernels.gemm.quantize import QuantizeRows, as_bytes


class PagedFmhaCall:
    """Attention whose arguments are those of `paged_args`; an architecture says what a launch is.

    Attributes:
        arch: of the kernels.

    Raises:
        ValueError: a configuration that no kernel serves.
    """

    arch: str

    def __init__(self, config: PagedFmhaConfig):
        if not has_kernel(config):
            raise ValueError(f"no kernel serves {config}")
        self.config = config
        self.quantizer = QuantizeRows(config.num_query_heads * config.head_dim, TERMS)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        window_pool: cute.Tensor,
        window_indices: cute.Tensor,
        window_lens: cute.Tensor,
        compressed_pool: cute.Tensor,
        compressed_indices: cute.Tensor,
        compressed_lens: cute.Tensor,
        sink_logits: cute.Tensor,
        o: cute.Tensor,
        stream,
        *,
        q_factor: cute.Tensor,
        q_squares: cute.Tensor,
        rope: cute.Tensor,
        positions: cute.Tensor,
        block_table: cute.Tensor,
        request_ids: cute.Tensor,
        window_table: cute.Tensor,
        lse: cute.Tensor,
        max_logits: cute.Tensor,
        codes: cute.Tensor,
        code_scales: cute.Tensor,
        workspace: cute.Tensor,
        num_splits: cutlass.Int32,
        num_ctas: cutlass.Int32,
        sliding_window: cutlass.Int32,
        ratio: cutlass.Int32,
    ):
        """Launch the attention; see `PagedArguments`. What becomes codes, and is not rounded on its
        way, a launch behind it rounds.

        A split knows the largest of its own scores alone: where they are asked for, there is one,
        but of pieces there are as many as always.
        """
        if cutlass.const_expr(not self.config.batch_invariant):  # noqa: SIM102 static, then dynamic
            if max_logits.shape[0] > 0:
                num_splits = cutlass.Int32(1)
        arguments = PagedArguments(
            q,
            window_pool,
            window_indices,
            window_lens,
            compressed_pool,
            compressed_indices,
            compressed_lens,
            sink_logits,
            o,
            q_factor if self.config.q_eps is None else q_squares,
            rope,
            positions,
            block_table,
            request_ids,
            window_table,
            lse,
            max_logits,
            codes,
            as_bytes(code_scales),
            workspace,
            num_splits,
            num_ctas,
            sliding_window,
            ratio,
        )
        self.launch(arguments, stream)
        is_open = self.config.rounds_output and not always_rounds_rows(self.config, self.arch)
        if cutlass.const_expr(is_open):
            sizes = q.shape[0], num_splits, num_ctas
            if not rounds_rows(self.config, *sizes, self.arch):
                width = self.quantizer.k_blocks * K_BLOCK
                rows = cute.make_layout((q.shape[0], width), stride=(o.stride[0], 1))
                rows = cute.make_tensor(o.iterator, rows)
                self.quantizer.launch(rows, codes, arguments.code_scales, stream, num_ctas)

    def launch(self, arguments: PagedArguments, stream) -> None:
        """Launch what `arguments` ask for."""
        raise NotImplementedError

    def compile(self, options: str = ""):
        """Compile from fake tensors, to be called through tvm-ffi; needs no GPU."""
        args, optional = fake_arguments(self.config)
        options = f"--enable-tvm-ffi {options}".strip()
        return cute.compile(self, *args, **optional, options=options)
