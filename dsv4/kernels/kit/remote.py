"""Loads of, stores and additions to the shared memory of another CTA of a cluster, ordered by the
cluster's barriers."""

from cutlass import Int32, cute


def store_remote(target: cute.Pointer, rank: Int32, value: Int32) -> None:
    """Store a word to the same place in a CTA of the cluster."""
    cute.arch.inline_ptx(
        "st.shared::cluster.b32 [{$r0}], {$r1};",
        read_only_args=[cute.arch.map_dsmem_ptr(target, rank).toint(), value],
    )


def add_remote(target: cute.Pointer, rank: Int32, value: Int32) -> None:
    """Add to a word at the same place in a CTA of the cluster, which others may add to as well."""
    cute.arch.inline_ptx(
        "red.relaxed.cluster.shared::cluster.add.s32 [{$r0}], {$r1};",
        read_only_args=[cute.arch.map_dsmem_ptr(target, rank).toint(), value],
    )


def load_remote(
    source: cute.Pointer, rank: Int32, offset: Int32 | int = 0, count: int = 4, kind: type = Int32
) -> tuple:
    """Two or four words of the same place in a CTA of the cluster, aligned to all of them.

    Args:
        offset: bytes behind `source`, whose address in that CTA is found once for all offsets.
    """
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    return cute.arch.inline_ptx(
        f"ld.shared::cluster.v{count}.b32 {{{names}}}, [{{$r0}}];",
        write_only_types=[kind] * count,
        read_only_args=[cute.arch.map_dsmem_ptr(source, rank).toint() + offset],
    )
