"""Time of collectives: ring and tree algorithms under an alpha-beta model.

For n ranks on M machines and a message of B bytes (``Collective`` says which), a ring takes

    all-reduce                   launch + 2 alpha(n, M) + 2 (n-1)/n B / bandwidth
    all-gather, reduce-scatter   launch +   alpha(n, M) +   (n-1)/n B / bandwidth

(Thakur et al. 2005, doi 10.1177/1094342005051521). alpha(n, M) = (n - M) * step inside a machine + (M - 1) * step between
machines; a tree has ceil(log2 M) steps between machines instead, at the same bandwidth, as NCCL's double binary tree does.
A group that spans machines moves the same bytes over the links inside a machine and over the machine's network cards; the
slower of the two counts. The ranks of one machine use its cards at the same time, so a group has the part of them
that its ranks are of the machine's devices (``GroupLink.bandwidth``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any

import numpy as np

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.completion.work import CollectiveKind
from paddle_rbt_plugin.cost.constants import Constants


@dataclass(frozen=True)
class GroupNetwork:
    """What the ranks of one group communicate over: bytes per second in one direction, seconds per step.

    ``inter_bandwidth`` is the group's share of a machine's network cards while every device of the machine sends."""

    ranks: int
    machines: int
    intra_bandwidth: float
    intra_step: float
    inter_bandwidth: float
    inter_step: float
    memory_bandwidth: float

    @property
    def ranks_per_machine(self) -> int:
        """As if spread evenly, rounded up."""
        return ceil(self.ranks / self.machines)


def group_network(cluster: Cluster, ranks: tuple[int, ...]) -> GroupNetwork:
    """The network of a group of ranks. Raises ClusterError for ranks that the cluster lacks."""
    link = cluster.link(ranks)
    inside = link.link if link.level == "intra" else cluster.group_of(ranks[0]).intra_link
    return GroupNetwork(
        len(ranks),
        link.machines,
        inside.bandwidth,
        inside.latency,
        link.bandwidth,
        link.link.latency,
        cluster.device_of(ranks[0]).memory_bandwidth,
    )


def split_network(net: GroupNetwork, size: int) -> tuple[GroupNetwork, GroupNetwork]:
    """The networks of a part of ``size`` neighbours of a group, and of the ranks that hold the same place in all parts.

    The latter communicate all at once, so each of them has its part of the group's network cards."""
    here = net.ranks_per_machine
    inside = replace(net, ranks=size, machines=ceil(size / here))
    at_once = min(size, here)
    machines = min(net.machines, net.ranks // size) if size >= here else net.machines
    return inside, replace(net, ranks=net.ranks // size, machines=machines, inter_bandwidth=net.inter_bandwidth / at_once)


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, or of each pair of two arrays."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


def collective_seconds(kind: CollectiveKind, nbytes: Any, net: GroupNetwork, c: Constants) -> Any:
    """Time of one collective; 0 in a group of one rank. ``nbytes`` may be an array of messages, which gives one of times."""
    n, machines = net.ranks, net.machines
    if n == 1:
        return 0.0
    intra, inter = net.intra_bandwidth, net.inter_bandwidth * c.inter_bandwidth
    if kind == "p2p":
        if machines == 1:
            return c.collective_launch_s + net.intra_step + nbytes / intra
        return c.collective_launch_s + net.inter_step + nbytes / inter
    if kind == "all_to_all":
        seconds = nbytes * (n - 1) / n / intra
        if machines > 1:
            r = net.ranks_per_machine
            seconds = larger(seconds, r * nbytes * (n - r) / n / inter)
        return c.collective_launch_s + (n - 1) * net.intra_step + seconds
    moved = nbytes * (n - 1) / n
    seconds, alpha = moved / intra + c.collective_passes / 2 * nbytes / net.memory_bandwidth, (n - machines) * net.intra_step
    if machines > 1:
        seconds = larger(seconds, moved / inter)
        alpha += min(machines - 1, ceil(log2(machines))) * net.inter_step
    return c.collective_launch_s + (alpha + seconds) * (2 if kind == "all_reduce" else 1)
