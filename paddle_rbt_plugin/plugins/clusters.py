"""Cluster descriptions in which the devices of plugins can be named. Plugins are loaded only for a device that the
catalogue lacks."""

from __future__ import annotations

from collections.abc import Iterable

from paddle_rbt_plugin import cluster
from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.plugins.manager import load_plugins


def parse_cluster(value: object, blocked: Iterable[str] = ()) -> Cluster:
    """Reads a cluster description.

    ``value`` is the short form ``NODESxDEVICES:GPU``, groups joined by ``+``; the path of a YAML or JSON file; a dict with
    the same content as such a file; Paddle's cluster JSON or ``Cluster`` object; or a Cluster, which is returned as it is.
    ``blocked`` as in ``load_plugins``. Raises ClusterError that says what is wrong, where, and what would be right.
    """
    return cluster.parse_cluster(value, lambda: load_plugins(blocked).devices)


def detect_cluster(blocked: Iterable[str] = ()) -> Cluster:
    """The cluster of the running job, see ``cluster.detect_cluster``."""
    return cluster.detect_cluster(more=lambda: load_plugins(blocked).devices)
