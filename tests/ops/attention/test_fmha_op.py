"""The operator as torch sees it: schema, fakes, compilation, memory, strides, dispatch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops import fmha_runner_id, sparse_fmha_with_swa, warmup
from dsv4.ops.attention import sparse_fmha, torch_path
from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.ops.runtime import backend, launch, runner, state
from dsv4.testing.attention import Case, Inputs, assert_attention_close, make_inputs
from tests.ops.fake_cuda import FakeCuda

pytestmark = pytest.mark.stage("op")

CASE = Case(top_k=40, window_rows=30, sliding_window=20)
OP = torch.ops.dsv4.sparse_fmha_with_swa


def op_arguments(inputs: Inputs, *, extras: bool = True) -> tuple[tuple, dict]:
    """Arguments of the raw operator."""
    q = inputs.q
    options = inputs.options
    identity = fmha_runner_id(
        q.shape[2],
        q.shape[1],
        options["sliding_window"],
        inputs.compressed_kv.shape[1],
        is_causal=options["is_causal"],
        sink_mode=options["sink_mode"],
    )
    keywords = {}
    if extras:
        keywords = {
            "compressed_lens": options["compressed_lens"],
            "lse": torch.full(q.shape[:2], torch.nan),
            "workspace": torch.zeros(16),
        }
    return (*inputs.tensors, torch.full_like(q, torch.nan), identity), keywords


@pytest.mark.parametrize("extras", [False, True])
def test_schema(extras: bool, seed: int) -> None:
    """opcheck: schema, fake tensors, autograd registration, and AOT dispatch with dynamic sizes."""
    arguments, keywords = op_arguments(make_inputs(CASE, seed), extras=extras)
    torch.library.opcheck(OP.default, arguments, keywords)


def test_signature() -> None:
    """The names, order and mutations that callers rely on."""
    assert str(OP.default._schema) == (
        "dsv4::sparse_fmha_with_swa(Tensor q, Tensor compressed_kv, Tensor swa_kv, "
        "Tensor swa_lens, Tensor sink_logits, Tensor request_ids, Tensor(a!) o, int runner_id, "
        "Tensor? compressed_lens=None, Tensor(b!)? lse=None, Tensor(c!)? workspace=None) -> ()"
    )


def test_op_writes_what_it_was_given(seed: int) -> None:
    inputs = make_inputs(CASE, seed)
    arguments, keywords = op_arguments(inputs)
    assert OP(*arguments, **keywords) is None
    assert_attention_close(
        arguments[6], inputs.expected()[0], keywords["lse"], inputs.expected()[1]
    )


def test_op_works_without_optional_arguments(seed: int) -> None:
    inputs = make_inputs(Case(top_k=40, ragged=False), seed)
    arguments, _ = op_arguments(inputs, extras=False)
    OP(*arguments)
    assert_attention_close(arguments[6], inputs.expected()[0])


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_torch_compile(compiler: str, seed: int) -> None:
    """fullgraph, with sizes that change between calls, equals the plain call."""
    if compiler == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler")
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend=compiler)
    def layer(inputs: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = sparse_fmha_with_swa(*inputs.tensors, **inputs.options, return_lse=True)
        return o * scale, lse

    for top_k, count in ((40, 3), (41, 3), (70, 9)):
        case = Case(top_k=top_k, requests=((0, count), (-1, 1)))
        inputs = make_inputs(case, seed)
        o, lse = layer(inputs, 2.0)
        expected_o, expected_lse = sparse_fmha_with_swa(
            *inputs.tensors, **inputs.options, return_lse=True
        )
        torch.testing.assert_close(o, expected_o * 2)
        torch.testing.assert_close(lse, expected_lse)


def test_compiled_sizes_stay_dynamic(seed: int) -> None:
    """With dynamic sizes, other token counts and a context growing to 128 rows reuse one graph."""
    torch.compiler.reset()
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def layer(inputs: Inputs) -> torch.Tensor:
        return sparse_fmha_with_swa(*inputs.tensors, **inputs.options)

    for top_k, count in ((70, 4), (100, 6), (128, 9)):
        inputs = make_inputs(Case(top_k=top_k, requests=((0, count), (-1, 1))), seed)
        torch.testing.assert_close(
            layer(inputs), sparse_fmha_with_swa(*inputs.tensors, **inputs.options)
        )
    assert counter.frame_count == 1


def test_fake_cuda_tensors(seed: int) -> None:
    """Shapes, dtypes and devices propagate for CUDA on a machine without CUDA."""
    inputs = make_inputs(CASE, seed)
    with FakeTensorMode() as mode:
        there = [mode.from_tensor(tensor) for tensor in inputs.tensors]
        there = [torch.empty_like(tensor, device="cuda") for tensor in there]
        lens = torch.empty(CASE.tokens, dtype=torch.int32, device="cuda")
        options = {**inputs.options, "compressed_lens": lens}
        o, lse = sparse_fmha_with_swa(*there, **options, return_lse=True)
        assert (o.device.type, o.dtype, o.shape) == ("cuda", torch.bfloat16, there[0].shape)
        assert (lse.device.type, lse.dtype, lse.shape) == (
            "cuda",
            torch.float32,
            there[0].shape[:2],
        )
        with pytest.raises(ValueError, match="request_ids"):
            ids = torch.empty(1, dtype=torch.int32, device="cuda")
            sparse_fmha_with_swa(*there[:5], ids, **options)


def test_gradients_are_refused(seed: int) -> None:
    """The op has no backward pass: silence would train on zero gradients."""
    inputs = make_inputs(CASE, seed)
    for name in ("q", "compressed_kv", "swa_kv", "sink_logits"):
        place = ("q", "compressed_kv", "swa_kv", "swa_lens", "sink_logits").index(name)
        wanting = inputs.replaced(**{name: inputs.tensors[place].clone().requires_grad_()})
        with pytest.raises(ValueError, match=f"{name}: requires grad"):
            sparse_fmha_with_swa(*wanting.tensors, **wanting.options)
        arguments, keywords = op_arguments(wanting)
        with pytest.raises(ValueError, match=f"{name}: requires grad"):
            OP(*arguments, **keywords)
        with torch.no_grad():
            sparse_fmha_with_swa(*wanting.tensors, **wanting.options)


def test_tangents_are_refused(seed: int) -> None:
    """Nor has it a forward-mode derivative: silence would be a tangent of zeros."""
    inputs = make_inputs(CASE, seed)
    q, *rest = inputs.tensors

    def attend(q: torch.Tensor) -> torch.Tensor:
        return sparse_fmha_with_swa(q, *rest, **inputs.options)

    with pytest.raises(ValueError, match="q: carries a tangent"):
        torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    with forward_ad.dual_level():
        attend(q)
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ValueError, match="q: carries a tangent"):
            attend(dual)
        arguments, keywords = op_arguments(inputs.replaced(q=dual))
        with pytest.raises(ValueError, match="q: carries a tangent"):
            OP(*arguments, **keywords)


class LiveBytes(TorchDispatchMode):
    """Tracks the bytes of all tensors made under it that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in tree_leaves(args) if torch.is_tensor(x)}
        result = func(*args, **(kwargs or {}))
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def peak_bytes(tokens: int, *, top_k: int = 2048, rows: int = 640) -> int:
    """Peak of temporaries of the CPU implementation; compressed keys are one expanded row set."""
    config = FmhaConfig(512, 8, rows, top_k, is_causal=True, sink_mode="softmax")
    q = torch.randn(tokens, 8, 512).bfloat16()
    compressed_kv = torch.randn(top_k, 512).bfloat16().expand(tokens, -1, -1)
    swa_kv = torch.randn(1, rows, 512).bfloat16()
    ids, lens = torch.zeros(tokens, dtype=torch.int32), torch.tensor([rows], dtype=torch.int32)
    o, lse = torch.empty_like(q), torch.empty(tokens, 8)
    with LiveBytes() as live:
        torch_path.sparse_fmha(
            config, q, compressed_kv, swa_kv, lens, torch.randn(8), ids, o, None, lse
        )
    assert o.isfinite().all()
    return live.peak


def test_memory_does_not_grow_with_keys() -> None:
    """Temporaries stay within O(T * n_h * tile): here within 12 MiB and 200 bytes per token.

    Gathering the keys of all 96 tokens in float32 would take 528 MiB.
    """
    few, many = peak_bytes(16), peak_bytes(96)
    assert many < 12 << 20
    assert many - few <= 80 * 200
    assert peak_bytes(16, top_k=64, rows=64) > 16 * 8 * 512 * 4, "the tracker sees nothing"


def test_expanded_keys(seed: int) -> None:
    """A row set shared by all tokens (stride 0) needs no copy."""
    inputs = make_inputs(Case(top_k=300, ragged=False), seed)
    shared = inputs.compressed_kv[:1].expand(CASE.tokens, -1, -1)
    inputs = inputs.replaced(compressed_kv=shared)
    o = sparse_fmha_with_swa(*inputs.tensors, **inputs.options)
    assert_attention_close(o, inputs.expected()[0])


def test_strided_tensors(seed: int) -> None:
    """Rows inside wider rows, tokens inside larger steps, an output inside a larger buffer."""
    inputs = make_inputs(CASE, seed)
    expected = inputs.expected()[0]

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        shape = tensor.shape
        buffer = torch.full((shape[0], 2 * shape[1] + 1, shape[2] + 64), torch.nan).to(tensor.dtype)
        view = buffer[:, 1 : 2 * shape[1] : 2, : shape[2]]
        view.copy_(tensor)
        return view

    strided = inputs.replaced(
        q=widened(inputs.q),
        compressed_kv=widened(inputs.compressed_kv),
        swa_kv=widened(inputs.swa_kv),
    )
    buffer = torch.full((CASE.tokens + 2, 8, 192), 3.0).bfloat16()
    out = buffer[1:-1, :, 64:128]
    sparse_fmha_with_swa(*strided.tensors, **strided.options, out=out)
    assert_attention_close(out, expected)
    out.fill_(3.0)
    assert (buffer == 3).all(), "wrote outside the output"


def test_more_than_2_to_31_elements(seed: int) -> None:
    """Offsets past 2^31 elements: rows of the last token start there.

    Only the rows in use are ever touched, so the 4 GiB buffers take no memory.
    """
    inputs = make_inputs(Case(top_k=70, window_rows=40, requests=((0, 1), (1, 2)), batch=2), seed)
    step = 2**31

    def spread(tensor: torch.Tensor, stride: int) -> torch.Tensor:
        size = stride * (tensor.shape[0] - 1) + tensor[0].numel()
        view = torch.empty(size, dtype=tensor.dtype).as_strided(
            tensor.shape, (stride, *tensor.stride()[1:])
        )
        return view.copy_(tensor)

    far = inputs.replaced(
        compressed_kv=spread(inputs.compressed_kv, step // 2 + 64),
        swa_kv=spread(inputs.swa_kv, step + 64),
    )
    assert far.compressed_kv.stride(0) * 2 > step
    o = sparse_fmha_with_swa(*far.tensors, **far.options)
    assert_attention_close(o, inputs.expected()[0])


def test_token_alone_equals_token_in_batch(seed: int) -> None:
    inputs = make_inputs(Case(requests=((2, 1), (0, 1), (3, 1)), growing=True), seed)
    o = sparse_fmha_with_swa(*inputs.tensors, **inputs.options)
    q, compressed_kv, swa_kv, swa_lens, sinks, ids = inputs.tensors
    for t in range(3):
        own = slice(t, t + 1)
        options = {**inputs.options, "compressed_lens": inputs.compressed_lens[own]}
        alone = sparse_fmha_with_swa(
            q[own], compressed_kv[own], swa_kv, swa_lens, sinks, ids[own], **options
        )
        torch.testing.assert_close(alone[0], o[t])


@pytest.fixture(scope="module")
def another_process() -> subprocess.CompletedProcess[str]:
    """A process that imports the package: an operator, and an id of a configuration."""
    code = (
        "import sys, dsv4, torch; print(torch.ops.dsv4.sparse_fmha_with_swa.default); "
        "print(dsv4.ops.fmha_runner_id(512, 128, 128, 1024, sink_mode='softmax')); "
        "raise SystemExit('cutlass' in sys.modules)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_runner_ids(another_process) -> None:
    """One id per configuration, the same in every process."""
    first = fmha_runner_id(512, 128, 128, 1024, sink_mode="softmax")
    assert first == fmha_runner_id(512, 128, 128, 1024, sink_mode="softmax", is_causal=False)
    others = {
        fmha_runner_id(512, 128, 128, 1024),
        fmha_runner_id(512, 64, 128, 1024, sink_mode="softmax"),
        fmha_runner_id(512, 128, 128, 1024, sink_mode="softmax", is_causal=True),
        fmha_runner_id(512, 128, 128, 1024, sink_mode="softmax", softmax_scale=0.1),
        fmha_runner_id(512, 128, 128, 1024, sink_mode="softmax", num_splits=2),
    }
    assert len(others | {first}) == 6
    assert runner.runner_config(first) == FmhaConfig(512, 128, 128, 1024, sink_mode="softmax")
    assert int(another_process.stdout.split()[1]) == first


def test_growing_context_keeps_its_runner(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """From 65 to 128 compressed rows nothing compiles again."""
    seen = set()
    monkeypatch.setattr(sparse_fmha, "_op", lambda *args: seen.add(args[7]))
    for top_k in (65, 66, 100, 128):
        inputs = make_inputs(Case(top_k=top_k), seed)
        sparse_fmha_with_swa(*inputs.tensors, **inputs.options)
    assert len(seen) == 1


def test_cold_capture_names_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error during a CUDA graph capture contains the call that would have prevented it."""
    config = FmhaConfig(128, 16, 64, 256, is_causal=True, sink_mode="softmax", num_splits=4)
    state.refuse_cold_capture(SPARSE_FMHA, config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph") as caught:
        state.refuse_cold_capture(SPARSE_FMHA, config)
    call = re.search(r"dsv4\.ops\.warmup\(.*max_tokens\)", str(caught.value))[0]
    warmed = []
    monkeypatch.setattr("dsv4.ops.warmup", lambda identity, tokens: warmed.append(identity))
    import dsv4.ops

    eval(call, {"dsv4": dsv4, "max_tokens": 8})
    assert runner.runner_config(warmed[0]) == config


def test_warmup_on_the_cpu() -> None:
    warmup(fmha_runner_id(64, 8, 128, 64), 16, "cpu")
    with pytest.raises(ValueError, match="max_tokens"):
        warmup(fmha_runner_id(64, 8, 128, 64), -1)
    with pytest.raises(ValueError, match="runner_id: 12 names no runner"):
        warmup(12, 1)


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch):
    """Make torch report a GPU of a given capability, and forget what was found before."""

    def pretend(capability: tuple[int, int]) -> None:
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    for cached in (backend.device_of, backend._fall_back):
        cached.cache_clear()
    yield pretend
    for cached in (backend.device_of, backend._fall_back):
        cached.cache_clear()


def find_kernel() -> backend.Device | None:
    return backend.find_kernel(SPARSE_FMHA.name, SPARSE_FMHA.kernels, 5)


def test_unknown_gpu_gets_torch_with_one_warning(pretend_gpu, seed: int) -> None:
    pretend_gpu((8, 0))
    with pytest.warns(RuntimeWarning, match=r"no kernel for Some GPU \(sm_80\).*torch") as caught:
        assert find_kernel() is None
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_kernel() is None
    check_torch_launch(seed)


def check_torch_launch(seed: int) -> None:
    """What is bound where no kernel serves computes the right result."""
    inputs = make_inputs(CASE, seed)
    arguments, keywords = op_arguments(inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "find_kernel", lambda *_: None)
        SPARSE_FMHA.cuda(*arguments, *keywords.values())
    assert_attention_close(
        arguments[6], inputs.expected()[0], keywords["lse"], inputs.expected()[1]
    )


def test_missing_kernel_compiler_gets_torch(pretend_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu((9, 0))
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.warns(RuntimeWarning, match="cannot be loaded"):
        assert find_kernel() is None


def test_a_variable_selects_torch(pretend_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """DSV4_OPS=torch: the plain path on a GPU that has a kernel, without a warning."""
    pretend_gpu((9, 0))
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace())
    assert find_kernel() == ("sm_90a", 132)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("DSV4_OPS", "torch")
        assert find_kernel() is None
    monkeypatch.setenv("DSV4_OPS", "cpu")
    with pytest.raises(ValueError, match="DSV4_OPS: got 'cpu', needs 'torch'"):
        find_kernel()


def test_failed_launch_is_explained(fake_cuda: FakeCuda, seed: int) -> None:
    """A kernel's terse complaint about an argument becomes the named error; others pass through."""

    def run(*_: object) -> None:
        raise RuntimeError("Mismatched Tensor on argument #3")

    fake_cuda.kernel = run
    arguments, keywords = op_arguments(make_inputs(CASE, seed))
    options, cuda = tuple(keywords.values()), SPARSE_FMHA.cuda
    wrong = (*arguments[:3], arguments[3].long(), *arguments[4:])
    with pytest.raises(TypeError, match=r"swa_lens: got torch\.int64, needs torch\.int32"):
        cuda(*wrong, *options)
    strided = torch.zeros(8, dtype=torch.int32)[::2]
    with pytest.raises(ValueError, match=r"swa_lens: got strides"):
        cuda(*arguments[:3], strided, *arguments[4:], *options)
    with pytest.raises(RuntimeError, match="argument #3"):
        cuda(*arguments, *options)


def test_float32_reaches_no_kernel(fake_cuda: FakeCuda, seed: int) -> None:
    """Kernels are for bfloat16: on a GPU, too, float32 is computed by torch."""
    fake_cuda.kernel = lambda *_: pytest.fail("launched a kernel")
    inputs = make_inputs(CASE, seed, torch.float32)
    arguments, keywords = op_arguments(inputs)
    options, cuda = tuple(keywords.values()), SPARSE_FMHA.cuda
    cuda(*arguments, *options)
    for actual, expected in zip((arguments[6], keywords["lse"]), inputs.expected()):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(TypeError, match=r"swa_lens: got torch\.int64, needs torch\.int32"):
        cuda(*arguments[:3], arguments[3].long(), *arguments[4:], *options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype, seed: int) -> None:
    """The operator's precision is its tensors', also inside a model under autocast."""
    inputs = make_inputs(CASE, seed, dtype)
    expected = sparse_fmha_with_swa(*inputs.tensors, **inputs.options, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = sparse_fmha_with_swa(*inputs.tensors, **inputs.options, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


def test_import_of_the_package_registers_the_operators(another_process) -> None:
    """`torch.ops.dsv4.*` is there after `import dsv4`, and no kernel compiler with it."""
    done = another_process
    assert (done.returncode, done.stderr) == (0, "")
    assert "dsv4.sparse_fmha_with_swa.default" in done.stdout


def test_checks_read_no_values(seed: int) -> None:
    """The checks run on fake tensors, which have no values: on a GPU they cannot synchronise."""
    arguments, keywords = op_arguments(make_inputs(CASE, seed))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (*arguments[:7], *keywords.values())]
        SPARSE_FMHA.check(runner.runner_config(arguments[7]), tuple(fakes))
