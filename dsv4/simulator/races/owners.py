"""Owners of accesses to global memory: the agents of all clusters of a launch."""

from __future__ import annotations

from dsv4.simulator.ptx.qualifiers import Scope

AGENT_BITS = 20  # of an owner: cluster number and agent
AGENT = (1 << AGENT_BITS) - 1


def owner_of(w, agent: int) -> int:
    """An agent of the warp's cluster."""
    return w.cluster.number << AGENT_BITS | agent


def distance_of(w, owner: int) -> Scope:
    """How far a warp and the owner of an access are apart; engines count as of their cluster."""
    cluster, agent = owner >> AGENT_BITS, owner & AGENT
    if cluster != w.cluster.number:
        return Scope.GPU if cluster // w.launch.clusters_per_gpu == w.cluster.gpu else Scope.SYS
    return Scope.CTA if agent // w.launch.warps == w.cta.rank else Scope.CLUSTER
