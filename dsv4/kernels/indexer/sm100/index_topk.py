"""`index_topk` for Blackwell (sm_100a)."""

from dsv4.kernels.indexer.config import ARGS, IndexTopkConfig, values
from dsv4.kernels.indexer.index_topk import IndexTopk
from dsv4.kernels.indexer.sm100.products import products_of
from dsv4.kernels.kit.args import compile_kernel


def build(config: IndexTopkConfig, options: str = ""):
    """Compile the kernels of `config` for sm_100a; needs no GPU."""
    kernels = IndexTopk(config, products_of, has_tmem=True)
    return compile_kernel(kernels, ARGS, values(config), options)
