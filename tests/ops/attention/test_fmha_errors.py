"""Wrong arguments end in one error that names the argument, what it got and what it needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops import fmha_runner_id, sparse_fmha_with_swa
from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.ops.runtime import checks
from dsv4.testing.attention import Case, Inputs, make_inputs

pytestmark = pytest.mark.stage("op")

CASE = Case(top_k=40, window_rows=30, sliding_window=20)  # 9 tokens, 8 heads of 64, 4 requests


def call_with(inputs: Inputs, name: str, how: Callable) -> None:
    """Call the public function with one argument changed."""
    options = {}
    if hasattr(inputs, name):
        inputs = inputs.replaced(**{name: how(getattr(inputs, name))})
    else:
        options[name] = how(None)
    sparse_fmha_with_swa(*inputs.tensors, **inputs.options, **options)


def scattered(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


WRONG = [
    ("q", lambda x: x[0], ValueError, r"q: got shape \(8, 64\), needs \[T, n_h, head_dim\]"),
    ("q", lambda x: x.double(), TypeError, r"q: got torch\.float64, needs torch\.bfloat16"),
    ("q", scattered, ValueError, r"q: got strides .* last dimension must be contiguous"),
    ("compressed_kv", lambda x: x[0], ValueError, r"compressed_kv: got shape \(40, 64\)"),
    ("compressed_kv", lambda x: x[1:], ValueError, r"compressed_kv: .* needs \[9, top_k, 64\]"),
    ("compressed_kv", lambda x: x.float(), TypeError, r"compressed_kv: got torch\.float32"),
    ("compressed_kv", scattered, ValueError, r"compressed_kv: got strides"),
    ("swa_kv", lambda x: x[..., :32], ValueError, r"swa_kv: .* needs \[batch, W, 64\]"),
    ("swa_kv", lambda x: x.float(), TypeError, r"swa_kv: got torch\.float32"),
    ("swa_kv", lambda x: x.to("meta"), ValueError, r"swa_kv: got a tensor on meta, q is on cpu"),
    ("swa_kv", scattered, ValueError, r"swa_kv: got strides"),
    ("swa_lens", lambda x: x.long(), TypeError, r"swa_lens: got torch\.int64, needs torch\.int32"),
    ("swa_lens", lambda x: x[:3], ValueError, r"swa_lens: got shape \(3,\), needs \[4\]"),
    ("sink_logits", lambda x: x.bfloat16(), TypeError, r"sink_logits: .* needs torch\.float32"),
    ("sink_logits", lambda x: x[:4], ValueError, r"sink_logits: got shape \(4,\), needs \[8\]"),
    ("request_ids", lambda x: x.long(), TypeError, r"request_ids: .* needs torch\.int32"),
    ("request_ids", lambda x: x[:2], ValueError, r"request_ids: got shape \(2,\), needs \[9\]"),
    ("request_ids", lambda x: x + 2, ValueError, r"request_ids: got values from 1 to 4.* to 3"),
    ("request_ids", lambda x: x - 1, ValueError, r"request_ids: got values from -2 to 1"),
    ("compressed_lens", lambda x: x.long(), TypeError, r"compressed_lens: got torch\.int64"),
    ("compressed_lens", lambda x: x[1:], ValueError, r"compressed_lens: got shape \(8,\)"),
    ("out", lambda _: torch.empty(9, 8, 64), TypeError, r"o \(out\): got torch\.float32"),
    ("out", lambda _: torch.empty(9, 8, 32).bfloat16(), ValueError, r"o \(out\): got shape \(9, "),
    ("sliding_window", lambda _: -1, ValueError, r"sliding_window must not be negative, got -1"),
    ("sink_mode", lambda _: "gate", ValueError, r"sink_mode must be one of .*, got 'gate'"),
    ("num_splits", lambda _: 0, ValueError, r"num_splits must be at least 1"),
    ("q", lambda _: None, TypeError, r"q: got None, needs a torch\.Tensor"),
    ("compressed_kv", lambda x: x.float().numpy(), TypeError, r"compressed_kv: got a ndarray"),
    ("swa_kv", lambda x: x.to_sparse(), TypeError, r"swa_kv: got layout torch\.sparse_coo"),
    ("swa_lens", lambda x: x.tolist(), TypeError, r"swa_lens: got a list, needs a torch\.Tensor"),
    ("swa_lens", lambda x: x.bool(), TypeError, r"swa_lens: got torch\.bool, needs torch\.int32"),
    ("request_ids", lambda x: x.float(), TypeError, r"request_ids: got torch\.float32"),
    ("request_ids", lambda _: None, TypeError, r"request_ids: got None"),
    ("compressed_lens", lambda _: [3], TypeError, r"compressed_lens: got a list"),
    ("q", lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), TypeError, "q: got"),
    ("out", lambda _: "x", TypeError, r"o \(out\): got a str, needs a torch\.Tensor"),
    (
        "out",
        lambda _: torch.empty(1, 8, 64).bfloat16().expand(9, -1, -1),
        ValueError,
        r"o \(out\): got strides \(0, 64, 1\) .* an element of its own for every index",
    ),
    (
        "sink_mode",
        lambda _: ["softmax"],
        TypeError,
        r"sink_mode: got \['softmax'\], needs a string",
    ),
    ("softmax_scale", lambda _: 1j, TypeError, r"softmax_scale: got 1j, needs a real number"),
    ("softmax_scale", lambda _: torch.ones(2), TypeError, r"softmax_scale: got tensor"),
    ("sliding_window", lambda _: 2.5, TypeError, r"sliding_window: got 2\.5, needs an integer"),
    ("num_splits", lambda _: "2", TypeError, r"num_splits: got '2', needs an integer"),
    ("is_causal", lambda _: "yes", TypeError, r"is_causal: got 'yes', needs True or False"),
]


@pytest.mark.parametrize(
    ("name", "how", "kind", "message"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)]
)
def test_message(name: str, how: Callable, kind: type, message: str, seed: int) -> None:
    inputs = make_inputs(CASE, seed)
    with pytest.raises(kind, match=message):
        call_with(inputs, name, how)


def test_sink_mode_has_no_default(seed: int) -> None:
    """Both modes run on the same arguments and differ silently: the caller must choose."""
    inputs = make_inputs(CASE, seed)
    with pytest.raises(TypeError, match="sink_mode"):
        sparse_fmha_with_swa(*inputs.tensors)


def test_causal_tokens_must_be_consecutive(seed: int) -> None:
    scrambled = replace(CASE, requests=((0, 2), (1, 1), (0, 1)), is_causal=True)
    inputs = make_inputs(scrambled, seed)
    with pytest.raises(ValueError, match=re.escape("consecutive, got [0, 0, 1, 0]")):
        sparse_fmha_with_swa(*inputs.tensors, **inputs.options)


def op_call(inputs: Inputs, identity: int, **keywords: torch.Tensor) -> None:
    o = torch.empty_like(inputs.q)
    torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, o, identity, **keywords)


def test_runner_must_fit_the_tensors(seed: int) -> None:
    """A runner of other heads, other head_dim or fewer rows is refused by the op."""
    inputs = make_inputs(CASE, seed)
    with pytest.raises(ValueError, match="runner_id: 7 names no runner"):
        op_call(inputs, 7)
    with pytest.raises(ValueError, match=r"q: got shape \(9, 8, 64\), needs \[T, 16, 64\]"):
        op_call(inputs, fmha_runner_id(64, 16, 20, 40))
    with pytest.raises(ValueError, match=r"compressed_kv: got 40 rows .* top_k = 39"):
        op_call(inputs, fmha_runner_id(64, 8, 20, 39))


def test_lse_and_workspace_must_fit(seed: int) -> None:
    inputs = make_inputs(CASE, seed)
    identity = fmha_runner_id(64, 8, 20, 40)
    with pytest.raises(ValueError, match=r"lse: got shape \(8, 9\), needs \[9, 8\]"):
        op_call(inputs, identity, lse=torch.empty(8, 9))
    with pytest.raises(ValueError, match="workspace: got a tensor on meta"):
        op_call(inputs, identity, workspace=torch.empty(4, device="meta"))


VALUES = SPARSE_FMHA.values(FmhaConfig(64, 8, 20, 40))


def check_layout(*tensors: torch.Tensor | None) -> None:
    """`check_kernel_layout` of the first tensors of the operator."""
    absent = (None,) * (len(SPARSE_FMHA.tensors) - len(tensors))
    checks.check_kernel_layout(SPARSE_FMHA.tensors, VALUES, (*tensors, *absent))


def test_rows_must_be_aligned() -> None:
    """GPU kernels load 16 bytes at a time: an offset or a stride in between is refused by name."""
    buffer = torch.zeros(4 * 3 * 72 + 8, dtype=torch.bfloat16)
    start = -buffer.data_ptr() // 2 % 8
    good = buffer[start:].as_strided((3, 2, 64), (72 * 2, 72, 1))
    check_layout(good, None, good)
    for shifted in (
        buffer[start + 1 :].as_strided((3, 2, 64), (144, 72, 1)),
        buffer[start:].as_strided((3, 2, 64), (144, 68, 1)),
        buffer[start:].as_strided((3, 2, 64), (140, 72, 1)),
    ):
        with pytest.raises(ValueError, match=r"swa_kv: got strides .* multiple of 16 bytes"):
            check_layout(good, good, shifted)
    # A dimension of one row never steps.
    check_layout(buffer[start:].as_strided((3, 1, 64), (144, 5, 1)))


def test_kernels_need_contiguous_vectors_and_bfloat16() -> None:
    strided = torch.zeros(8, dtype=torch.int32)[::2]
    with pytest.raises(ValueError, match=r"swa_lens: got strides \(2,\).* contiguous"):
        check_layout(None, None, None, strided)
    with pytest.raises(ValueError, match=r"lse: got strides \(1, 4\)"):
        check_layout(*[None] * 8, torch.zeros(8, 4).mT)
    with pytest.raises(TypeError, match=r"q: got torch\.float32, the kernel needs torch\.bfloat16"):
        check_layout(torch.zeros(2, 8, 64))


@pytest.mark.parametrize("name", ["q", "compressed_kv", "swa_kv"])
def test_outputs_have_memory_of_their_own(name: str, seed: int) -> None:
    """CTAs read keys and queries while others write: an output over an input is a race on a GPU."""
    inputs = make_inputs(CASE, seed)
    place = ("q", "compressed_kv", "swa_kv").index(name)
    tensor = inputs.tensors[place]
    out = tensor.flatten()[: inputs.tensors[0].numel()]
    if out.numel() < inputs.tensors[0].numel():
        larger = torch.zeros(inputs.tensors[0].numel(), dtype=tensor.dtype)
        tensor = larger[: tensor.numel()].view(tensor.shape).copy_(tensor)
        out, inputs = larger, inputs.replaced(**{name: tensor})
    with pytest.raises(ValueError, match=rf"o \(out\): shares memory with {name}"):
        sparse_fmha_with_swa(
            *inputs.tensors, **inputs.options, out=out.view(inputs.tensors[0].shape)
        )
