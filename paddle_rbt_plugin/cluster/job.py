"""The running job: which devices it has, and whether a cluster description fits it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import groupby

from ..errors import ClusterError
from ..spelling import counted
from .catalogue import CatalogueEntry, MoreDevices, device_names, find_device, recognise
from .cluster import Cluster


def detect_cluster(environ: Mapping[str, str] | None = None, more: MoreDevices = dict) -> Cluster:
    """The cluster of the running job: one device per process, as ``paddle.distributed.launch`` started them.

    Paddle is asked for the name of this process's CUDA device; all processes are taken to have the same, and without CUDA
    the device is CPU. Processes per machine come from the environment (``os.environ`` by default): the hosts of
    ``PADDLE_TRAINER_ENDPOINTS``, or else ``PADDLE_TRAINERS_NUM`` in machines of ``PADDLE_LOCAL_SIZE``. A process that was not
    launched is a job of one device. ``more`` knows devices that the catalogue lacks. Raises ClusterError for a device that
    neither knows and for an environment that contradicts itself.
    """
    entry = _local_device(more)
    sizes = _machine_sizes(os.environ if environ is None else environ)
    return Cluster(tuple(entry.group(len(list(run)), size) for size, run in groupby(sizes)))


def check_job(cluster: Cluster, world_size: int) -> None:
    """Raises ClusterError, with the short form that would be right, unless the cluster has ``world_size`` devices."""
    if cluster.device_count == world_size:
        return
    first = cluster.groups[0]
    size, name = first.devices_per_machine, first.device.name
    full, rest = divmod(world_size, size)
    right = "+".join([f"{full}x{size}:{name}"] * (full > 0) + [f"1x{rest}:{name}"] * (rest > 0))
    raise ClusterError(
        f"the cluster {cluster} has {counted(cluster.device_count, 'device')}, but the running job has "
        f"{counted(world_size, 'process', 'processes')}; "
        f"describe the devices of the job, e.g. {right}, or start {counted(cluster.device_count, 'process', 'processes')}"
    )


def _local_device(more: MoreDevices) -> CatalogueEntry:
    import paddle  # only here: planning needs no Paddle to know its cluster

    if not paddle.is_compiled_with_cuda() or paddle.device.cuda.device_count() == 0:
        return find_device("CPU")
    product = paddle.device.cuda.get_device_properties().name
    entry = recognise(product, more)
    if entry is None:
        raise ClusterError(
            f"the CUDA device {product!r} is not in the catalogue ({', '.join(device_names(more))}); describe the cluster in "
            "a file with device, tflops, memory, memory_bandwidth, intra_link and nic"
        )
    return entry


def _machine_sizes(environ: Mapping[str, str]) -> list[int]:
    """Processes of each machine, in the order of their ranks."""
    world = _number(environ, "PADDLE_TRAINERS_NUM")
    endpoints = [e.strip() for e in environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",") if e.strip()]
    if endpoints:
        if world not in (None, len(endpoints)):
            raise ClusterError(f"PADDLE_TRAINERS_NUM is {world}, but PADDLE_TRAINER_ENDPOINTS names {len(endpoints)} processes")
        runs = [(host, len(list(run))) for host, run in groupby(e.rpartition(":")[0] for e in endpoints)]
        hosts = [host for host, _ in runs]
        for host in hosts:
            if hosts.count(host) > 1:
                raise ClusterError(f"PADDLE_TRAINER_ENDPOINTS: the processes of host {host} are not consecutive")
        return [size for _, size in runs]
    world = world or 1
    local = min(_number(environ, "PADDLE_LOCAL_SIZE") or world, world)
    if world % local:
        raise ClusterError(f"PADDLE_TRAINERS_NUM is {world}, which is not a multiple of PADDLE_LOCAL_SIZE, {local}")
    return [local] * (world // local)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ClusterError(f"the environment variable {name} is {text!r}; it must be a whole number above zero")
    return int(text)
