"""`index_topk` for Hopper (sm_90a)."""

from dsv4.kernels.indexer.config import ARGS, IndexTopkConfig, values
from dsv4.kernels.indexer.index_topk import IndexTopk
from dsv4.kernels.indexer.sm90.products import products_of
from dsv4.kernels.kit.args import compile_kernel


def build(config: IndexTopkConfig, options: str = ""):
    """Compile the kernels of `config` for sm_90a; needs no GPU."""
    kernels = IndexTopk(config, products_of, has_tmem=False)
    return compile_kernel(kernels, ARGS, values(config), options)
