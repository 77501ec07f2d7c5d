"""torch <-> kernels: the `torch.ops.dsv4` operators, and the functions that people call.

Importing this registers every operator and loads no kernel compiler. A new family is one import
here: its module declares a `KernelOp`.
"""

from dsv4.ops.attention.sparse_fmha import fmha_capacity, fmha_runner_id, sparse_fmha_with_swa
from dsv4.ops.attention.sparse_fmha_paged import (
    sparse_fmha_paged,
    sparse_fmha_paged_fp8,
    sparse_fmha_paged_runner_id,
)
from dsv4.ops.compress import compress, compress_runner_id
from dsv4.ops.fp8_linear import fp8_linear, fp8_linear_runner_id
from dsv4.ops.grouped_linear import (
    grouped_linear,
    grouped_linear_fp8,
    grouped_linear_runner_id,
)
from dsv4.ops.head_rotation import HeadRotation, head_squares
from dsv4.ops.index_rounding import IndexRounding, index_scales
from dsv4.ops.index_topk import index_topk, index_topk_runner_id
from dsv4.ops.kv_insert import kv_insert, kv_insert_runner_id
from dsv4.ops.latent_rows import (
    Compression,
    Requests,
    latent_rows,
    latent_rows_runner_id,
)
from dsv4.ops.linear_argmax import linear_argmax, linear_argmax_runner_id
from dsv4.ops.merged_linear import merged_linear, merged_linear_runner_id
from dsv4.ops.mhc_seam import Seam, mhc_seam, mhc_seam_runner_id
from dsv4.ops.moe.op import moe, moe_runner_id
from dsv4.ops.moe.rows import ExpertRows
from dsv4.ops.moe.weights import GatedWeights
from dsv4.ops.plain_linear import plain_linear, plain_linear_runner_id
from dsv4.ops.quantized_attention.op import quantized_attention, quantized_attention_runner_id
from dsv4.ops.quantized_attention.quantize_kv import (
    QuantizedKV,
    quantize_kv,
    quantize_kv_runner_id,
)
from dsv4.ops.quantized_attention.relayout import dshb_to_bhsd, dshb_to_bhsd_runner_id
from dsv4.ops.rms_norm_fp8 import rms_norm_fp8, rms_norm_fp8_runner_id
from dsv4.ops.runtime.warmup import warmup
from dsv4.ops.sample_tokens import sample_tokens, sample_tokens_runner_id
from dsv4.ops.step_indices import StepIndexTensors, step_indices, step_indices_runner_id

__all__ = [
    "Compression",
    "ExpertRows",
    "GatedWeights",
    "HeadRotation",
    "IndexRounding",
    "QuantizedKV",
    "Requests",
    "Seam",
    "StepIndexTensors",
    "compress",
    "compress_runner_id",
    "dshb_to_bhsd",
    "dshb_to_bhsd_runner_id",
    "fmha_capacity",
    "fmha_runner_id",
    "fp8_linear",
    "fp8_linear_runner_id",
    "grouped_linear",
    "grouped_linear_fp8",
    "grouped_linear_runner_id",
    "head_squares",
    "index_scales",
    "index_topk",
    "index_topk_runner_id",
    "kv_insert",
    "kv_insert_runner_id",
    "latent_rows",
    "latent_rows_runner_id",
    "linear_argmax",
    "linear_argmax_runner_id",
    "merged_linear",
    "merged_linear_runner_id",
    "mhc_seam",
    "mhc_seam_runner_id",
    "moe",
    "moe_runner_id",
    "plain_linear",
    "plain_linear_runner_id",
    "quantize_kv",
    "quantize_kv_runner_id",
    "quantized_attention",
    "quantized_attention_runner_id",
    "rms_norm_fp8",
    "rms_norm_fp8_runner_id",
    "sample_tokens",
    "sample_tokens_runner_id",
    "sparse_fmha_paged",
    "sparse_fmha_paged_fp8",
    "sparse_fmha_paged_runner_id",
    "sparse_fmha_with_swa",
    "step_indices",
    "step_indices_runner_id",
    "warmup",
]
