"""`compress` under test: steps of several requests, what they must leave, and the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kernels.compressor.config import CompressConfig
from dsv4.kernels.kit.kv_entry import Fp8Entry
from dsv4.ops.compress import COMPRESS
from dsv4.ops.index_keys import read_keys
from dsv4.ops.pools import decode_entries, entry_views
from dsv4.testing.kernel_call import OpInputs

EPS = 1e-6
FILL = 0x3A  # of pools at first: finite in every format


@dataclass(frozen=True)
class Case:
    """Sizes and options of a step.

    Attributes:
        starts, lens: of each request; a length below 0: padding, without a row of the state.
        chunk: C.
        dim, ratio, overlap, kv_format, is_index, is_rounded: as in `CompressConfig`.
        page: entries of a page.
        spare: tokens that rings hold beyond a mean's.
    """

    starts: tuple[int, ...]
    lens: tuple[int, ...]
    chunk: int = 1
    dim: int = 512
    ratio: int = 4
    overlap: bool = True
    kv_format: str = "fp8"
    is_index: bool = False
    is_rounded: bool = True
    rope_dim: int = 64
    page: int = 8
    spare: int = 2

    @property
    def config(self) -> CompressConfig:
        return CompressConfig(
            self.dim, self.ratio, self.overlap, EPS, "bf16", self.kv_format, self.is_index,
            self.is_rounded, rope_dim=self.rope_dim,
        )  # fmt: skip

    @property
    def blocks(self) -> int:
        """K."""
        return -(-self.chunk // self.ratio)


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a case; some entries that end have no slot."""

    op = COMPRESS

    case: Case
    tensors: dict[str, Tensor]

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        """Random projections; NaN in padding, and where rings hold no token of the request."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        batch, config = len(case.starts), case.config
        ring = config.terms + case.spare
        state = torch.full((batch + 2, ring, 2, config.width), torch.nan)
        rows = torch.randperm(batch + 2, generator=generator)[:batch]
        given = normal(batch, case.chunk, config.width), 3 * normal(batch, case.chunk, config.width)
        pages = -(-batch * case.blocks // case.page) + 2
        order = torch.randperm(pages * case.page, generator=generator)
        slots = torch.full((batch, case.blocks), -1)
        for b, (start, count) in enumerate(zip(case.starts, case.lens)):
            for position in range(max(0, start - ring), start):
                state[rows[b], position % ring, 0] = normal(config.width)
                state[rows[b], position % ring, 1] = 3 * normal(config.width)
            for tensor in given:
                tensor[b, max(count, 0) :] = torch.nan
            for k in range(case.blocks):
                if (start // case.ratio + k + 1) * case.ratio <= start + count:
                    slots[b, k] = order[b * case.blocks + k]
            if count < 0:
                rows[b] = -1
        angles = normal(max(case.starts) + case.chunk + 1, case.rope_dim // 2) * 10
        tensors = {
            "values": given[0],
            "scores": given[1],
            "ape": normal(case.ratio, config.width),
            "state": state,
            "weight": normal(case.dim),
            "rope": torch.cat((angles.cos(), angles.sin()), 1),
            "state_rows": rows.int(),
            "starts": torch.tensor(case.starts, dtype=torch.int32),
            "lens": torch.tensor(case.lens, dtype=torch.int32).clamp(min=0),
            "slots": slots.int(),
        }
        return cls(case, {name: x.to(device) for name, x in tensors.items()})

    @property
    def config(self) -> CompressConfig:
        return self.case.config

    @property
    def arguments(self) -> dict[str, Tensor]:
        """By the table's names, with a state and a pool of their own."""
        own = {"state": self.tensors["state"].clone(), "pool": self.pool()}
        return {**self.tensors, **own}

    def pool(self) -> Tensor:
        """[pages, P, row] of `FILL`, pages apart."""
        case, config, device = self.case, self.config, self.tensors["values"].device
        pages = -(-len(case.starts) * case.blocks // case.page) + 2
        size = 1 if config.is_packed else 2
        stride = -(-case.page * config.row * size // 16) * 16 + 48
        frame = torch.full((pages * stride,), FILL, dtype=torch.uint8, device=device)
        dtype = torch.uint8 if config.is_packed else torch.bfloat16
        shape = (pages, case.page, config.row)
        return frame.view(dtype).as_strided(shape, (stride // size, config.row, 1))

    def rows(self, indices: Sequence[int]) -> Inputs:
        """The same for some of the requests."""
        shared = ("ape", "state", "weight", "rope")
        found = {n: x if n in shared else x[list(indices)] for n, x in self.tensors.items()}
        case = Case(**{
            **vars(self.case),
            "starts": tuple(self.case.starts[i] for i in indices),
            "lens": tuple(self.case.lens[i] for i in indices),
        })  # fmt: skip
        return Inputs(case, found)

    def expected(self) -> dict[str, Tensor]:
        """State and pool after the torch implementation, on the CPU."""
        arguments = {name: x.cpu() for name, x in self.arguments.items() if name != "pool"}
        pool = Inputs(self.case, arguments).pool()
        COMPRESS.torch(self.config, *arguments.values(), pool)
        return {"state": arguments["state"], "pool": pool}


def decoded(case: Case, pool: Tensor) -> Tensor:
    """Entries [pages, P, d] of a pool in fp32."""
    if not case.config.is_packed:
        return pool.float()
    if case.is_index:
        pages, places = torch.meshgrid(*(torch.arange(n) for n in pool.shape[:2]), indexing="ij")
        return read_keys(pool, case.dim, pages, places)
    entry = Fp8Entry(case.dim, case.rope_dim)
    return decode_entries(*entry_views(pool, entry), entry).float()


def assert_step(inputs: Inputs, outputs: dict[str, Tensor]) -> None:
    """Compare state and pool with the torch implementation's: bits of the state, and of what is not
    written; of entries, values to a step of their format, few of them off by one."""
    case, wanted = inputs.case, inputs.expected()
    state, pool = outputs["state"].cpu(), outputs["pool"].cpu()
    same = (state == wanted["state"]) | (state.isnan() & wanted["state"].isnan())
    assert same.all(), f"state: {int((~same).sum())} of {same.numel()} elements differ"
    found, expected = decoded(case, pool), decoded(case, wanted["pool"])
    slots = inputs.tensors["slots"].cpu().flatten().long()
    is_written = torch.zeros(found.shape[:2], dtype=torch.bool).flatten()
    is_written[slots[slots >= 0]] = True
    is_written = is_written.view(found.shape[:2])
    assert torch.equal(found[~is_written], expected[~is_written]), "pool: others were written"
    found, expected = found[is_written], expected[is_written]
    error, size = (found - expected).abs(), expected.abs()
    scale = size.amax(-1, keepdim=True) if size.numel() else 0
    # Means of fast exponentials differ by some units of fp32, and now and then round to the next
    # number: of bf16, after a rotation of its pair, of e4m3, or of FP4.
    step = 2**-7 * scale if case.kv_format != "fp8" and not case.is_rounded else 2**-3 * size
    step = torch.maximum(torch.as_tensor(step), torch.as_tensor(2**-5 * scale))
    if case.is_index:
        step = 0.35 * scale + 0 * size
    off = (error > 1e-6 * scale).float().mean() if error.numel() else 0
    assert (error <= 1.01 * step).all(), f"pool: off by {(error / step).max():.2f} of a step"
    assert off < 2e-2, f"pool: {off:.1%} of the channels are off"
