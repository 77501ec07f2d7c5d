"""SageAttention's attention kernel for Hopper as a library that needs no torch.

Its device code is cut from a clone; the host's part here encodes the tensor maps and launches as
the official one does, with one scale for each thread, fp32+fp32 and bfloat16 outputs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HOST = "torch::Tensor qk_int8_sv_f8_accum_f32_attn_inst_buf("
LAUNCH = """
template <int D, MaskMode M>
static int launch(void *q, void *k, void *v, float *qs, float *ks, float *vs, void *o, int b,
                  int hq, int hk, int L, int S, float scale, cudaStream_t stream) {
  constexpr int Q = 64, K = 128;
  int padded = (S + K - 1) / K * K;
  auto of_q = create_tensor_map_4D<Q, D>((int8_t *)q, b, hq, L, D, hq * L * D, L * D, D);
  auto of_k = create_tensor_map_4D<K, D>((int8_t *)k, b, hk, S, D, hk * S * D, S * D, D);
  auto of_v = create_tensor_map_4D<D, K>((int8_t *)v, b, hk, D, padded, hk * D * padded,
                                         D * padded, padded);
  auto *kernel = qk_int8_sv_f8_attn_kernel<Q, K, 128, D, QuantGranularity::kPerThread,
                                           QuantGranularity::kPerThread, nv_bfloat16, M, false,
                                           true>;
  size_t bytes = Q * D + 2 * K * D;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  kernel<<<dim3((L + Q - 1) / Q, hq, b), 128, bytes, stream>>>(
      of_q, of_k, of_v, qs, ks, vs, (nv_bfloat16 *)o, nullptr, hq * L * D, L * D, D, L, S,
      hq / hk, scale);
  return (int)cudaGetLastError();
}

extern "C" int sage(int d, int causal, void *q, void *k, void *v, float *qs, float *ks, float *vs,
                    void *o, int b, int hq, int hk, int L, int S, float scale, void *stream) {
  auto s = (cudaStream_t)stream;
  constexpr auto whole = MaskMode::kNone, triangle = MaskMode::kCausal;
  auto *f = d == 64 ? (causal ? launch<64, triangle> : launch<64, whole>)
                    : (causal ? launch<128, triangle> : launch<128, whole>);
  return f(q, k, v, qs, ks, vs, o, b, hq, hk, L, S, scale, s);
}
"""


def build(source: Path, library: Path) -> None:
    """Compile a clone's kernel.

    Raises:
        SystemExit: no nvcc, no clone, or it does not compile.
    """
    csrc = source / "csrc"
    text = csrc / "qattn" / "qk_int_sv_f8_cuda_sm90.cu"
    if shutil.which("nvcc") is None or not text.is_file():
        raise SystemExit(f"sage_parity: needs nvcc, and {text}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "qattn").mkdir()
        for header in (*csrc.glob("*.cuh"), csrc / "qattn" / "attn_utils.cuh"):
            copied = re.sub(r"#include <torch/.*>", "", header.read_text())
            (folder / header.relative_to(csrc)).write_text(copied)
        # Its definitions follow the torch headers, and the host's part has those alone.
        device = text.read_text().partition(HOST)[0]
        device = re.sub(r"#include [<\"](torch/|../dispatch_utils).*[>\"]", "", device)
        headers = "#include <cassert>\n#include <cstdint>\n#include <type_traits>\n"
        (folder / "qattn" / "kernel.cu").write_text(headers + device + LAUNCH)
        command = [
            "nvcc", "-gencode", "arch=compute_90a,code=sm_90a", "-O3", "--use_fast_math",
            "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "-o",
            str(library), str(folder / "qattn" / "kernel.cu"),
        ]  # fmt: skip
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            raise SystemExit(f"sage_parity: nvcc: {found.stderr[-2000:]}")
