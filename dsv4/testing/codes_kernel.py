"""The kernels of FP8 codes by themselves: without those that launches with splits take they compile
in a quarter of the time."""

from __future__ import annotations

from cutlass import cute

from dsv4.kernels.attention.paged_call import PagedFmhaCall
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.sm90.paged_codes import PagedCodes
from dsv4.kernels.attention.sm100.paged_codes import PagedCodes2Cta


class CodesAlone(PagedFmhaCall):
    """Launches without splits alone."""

    def __init__(self, config: PagedFmhaConfig, kernel: type):
        super().__init__(config)
        self.codes = kernel(config)

    @cute.jit
    def launch(self, arguments: PagedArguments, stream):
        """Launch the kernel, whatever the number of splits."""
        self.codes.launch(arguments, stream)


def build(config: PagedFmhaConfig, options: str = ""):
    """Compile Hopper's kernel of `config`; needs no GPU."""
    return CodesAlone(config, PagedCodes).compile(options)


def build_sm100(config: PagedFmhaConfig, options: str = ""):
    """The same of Blackwell's."""
    return CodesAlone(config, PagedCodes2Cta).compile(options)
