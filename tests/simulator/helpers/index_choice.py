"""Launches of the indexer that must notice a change of its kernels."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from unittest import mock

from dsv4.kernels.indexer.config import TILE_KEYS
from dsv4.kernels.indexer.plan import CLUSTERS, ONE_LAUNCH_CLUSTERS, ClusterPlan
from dsv4.testing import index_topk
from tests.simulator.helpers.subjects import FEW_SMS, SEED, Subject, subject_of_op


@cache
def choice(key_format: str = "fp8", arch: str = "sm_90a") -> Subject:
    """Ragged lists, in one launch of each size of a cluster, and behind a launch of scores by CTAs
    and by clusters; and one that registers do not hold, which hold a vector of a thread here:
    further ones are copies of an unrolled loop.

    In clusters but the largest, where so many tiles take long, also lists that go round the ring,
    with scores of all magnitudes: of bins that every warp has cleared.
    """
    from dsv4.kernels.indexer import one_launch, select, selection

    lens = (70, 330, 5, 64, 0, 130, 65)
    options = {"gives_slots": True, "levels": 30, "key_format": key_format}
    ragged = index_topk.Case(lens, 64, padding_rows=1, **options)
    few = index_topk.Case(lens[:3], 64, **options)
    long = index_topk.Case((4_200, 100), 64, **options)
    small, *large = ONE_LAUNCH_CLUSTERS

    def filling(cluster: int) -> index_topk.Case:
        plan = ClusterPlan(
            key_format=key_format,
            page=ragged.page,
            has_tmem=arch == "sm_100a",
            cluster=cluster,
            topk=64,
        )
        tiles = plan.stages + 1
        entries = cluster * tiles * TILE_KEYS - 30
        return index_topk.Case((entries,), 64, **{**options, "levels": 0}, spread=6)

    launches = [
        (ragged, 0, small),
        *((few, 0, cluster) for cluster in large),
        *((ragged, FEW_SMS, cluster) for cluster in CLUSTERS),
        (long, FEW_SMS, 1),
        *((filling(cluster), 0, cluster) for cluster in (small, *large[:-1])),
    ]
    if key_format == "fp4" or arch == "sm_100a":
        # Tiles and products alone are other code, the same in clusters of any size. The ring of
        # scores has twenty tiles at most.
        longer = replace(ragged, lens=(1_400, *lens))
        launches = [
            (ragged, 0, small),
            (longer, 1, 1),
            (filling(small), 0, small),
            (ragged, FEW_SMS, 1),  # of CTAs that add up counts of one token
        ]
    return _subject(arch, (select, selection, one_launch), launches)


@cache
def choice_fp32(arch: str) -> Subject:
    """Scores in fp32: ragged lists, and one that registers do not hold, as above; keys in every
    digit of the k-th best one's."""
    from dsv4.kernels.indexer import select_fp32, selection

    options = {"gives_slots": True, "rank": "fp32"}
    ragged = index_topk.Case((70, 330, 5, 64, 0, 130, 65), 64, padding_rows=1, **options)
    long = index_topk.Case((4_200, 100), 64, **options, levels=30)
    launches = [(ragged, FEW_SMS, 1), (long, FEW_SMS, 1)]
    return _subject(arch, (select_fp32, selection), launches)


def _subject(arch: str, modules: tuple, launches: list[tuple]) -> Subject:
    """Launches of `index_topk`: a case each, CTAs of scores, and CTAs that choose."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "HELD", 1))
        return subject_of_op(
            arch,
            [
                (index_topk.Inputs.make(case, SEED), {"num_ctas": ctas, "cluster": cluster})
                for case, ctas, cluster in launches
            ],
            lambda given, found: index_topk.assert_choice(given, found.outputs),
        )
