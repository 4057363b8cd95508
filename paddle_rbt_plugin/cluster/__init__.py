"""Device catalogue, cluster descriptions and their parsers, process meshes. Imports neither Paddle nor anything above it."""

from .catalogue import CatalogueEntry, catalogue, catalogue_entry, find_device, recognise
from .cluster import RATED_PRECISIONS, Cluster, Device, GroupLink, Link, MachineGroup
from .job import check_job, detect_cluster
from .mesh import ProcessMesh, axis_link, describe_axis, factorisations, stage_meshes
from .parse import parse_cluster

__all__ = [
    "RATED_PRECISIONS",
    "CatalogueEntry",
    "Cluster",
    "Device",
    "GroupLink",
    "Link",
    "MachineGroup",
    "ProcessMesh",
    "axis_link",
    "catalogue",
    "catalogue_entry",
    "check_job",
    "describe_axis",
    "detect_cluster",
    "factorisations",
    "find_device",
    "parse_cluster",
    "recognise",
    "stage_meshes",
]
