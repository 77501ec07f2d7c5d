"""Call of a compiled paged attention kernel, the same on every architecture."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.paged_args import fake_arguments
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_plan import has_kernel


class PagedFmhaCall:
    """Attention whose arguments are those of `paged_args`; an architecture says what a launch is.

    Raises:
        ValueError: a configuration that no kernel serves.
    """

    def __init__(self, config: PagedFmhaConfig):
        if not has_kernel(config):
            raise ValueError(f"no kernel serves {config}")
        self.config = config

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
        workspace: cute.Tensor,
        num_splits: cutlass.Int32,
        num_ctas: cutlass.Int32,
        sliding_window: cutlass.Int32,
        ratio: cutlass.Int32,
    ):
        """Launch the attention; see `PagedArguments`.

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
            workspace,
            num_splits,
            num_ctas,
            sliding_window,
            ratio,
        )
        self.launch(arguments, stream)

    def launch(self, arguments: PagedArguments, stream) -> None:
        """Launch what `arguments` ask for."""
        raise NotImplementedError

    def compile(self, options: str = ""):
        """Compile from fake tensors, to be called through tvm-ffi; needs no GPU."""
        args, optional = fake_arguments(self.config)
        options = f"--enable-tvm-ffi {options}".strip()
        return cute.compile(self, *args, **optional, options=options)
