"""The kernel of FP8 codes by itself: without those that launches with splits take it compiles in a
quarter of the time."""

from __future__ import annotations

from cutlass import cute

from dsv4.kernels.attention.paged_call import PagedFmhaCall
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.sm90.paged_codes import PagedCodes


class CodesAlone(PagedFmhaCall):
    """Launches without splits alone."""

    def __init__(self, config: PagedFmhaConfig):
        super().__init__(config)
        self.codes = PagedCodes(config)

    @cute.jit
    def launch(self, arguments: PagedArguments, stream):
        """Launch the kernel, whatever the number of splits."""
        self.codes.launch(arguments, stream)


def build(config: PagedFmhaConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return CodesAlone(config).compile(options)
