"""Call of a compiled attention kernel, the same on every architecture."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.args import fake_arguments
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.context import FmhaArguments


class FmhaCall:
    """Attention whose arguments are those of `attention.args`; an architecture says what a launch
    is."""

    config: FmhaConfig

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        compressed_kv: cute.Tensor,
        swa_kv: cute.Tensor,
        swa_lens: cute.Tensor,
        sink_logits: cute.Tensor,
        request_ids: cute.Tensor,
        o: cute.Tensor,
        stream,
        *,
        compressed_lens: cute.Tensor,
        lse: cute.Tensor,
        workspace: cute.Tensor,
        num_splits: cutlass.Int32,
        num_ctas: cutlass.Int32,
    ):
        """Launch the attention; see `FmhaArguments`."""
        arguments = FmhaArguments(
            q,
            compressed_kv,
            swa_kv,
            swa_lens,
            sink_logits,
            request_ids,
            o,
            compressed_lens,
            lse,
            workspace,
            num_splits,
            num_ctas,
        )
        self.launch(arguments, stream)

    def launch(self, arguments: FmhaArguments, stream) -> None:
        """Launch what `arguments` ask for."""
        raise NotImplementedError

    def compile(self, options: str = ""):
        """Compile from fake tensors, to be called through tvm-ffi; needs no GPU."""
        args, optional = fake_arguments(self.config)
        options = f"--enable-tvm-ffi {options}".strip()
        return cute.compile(self, *args, **optional, options=options)
