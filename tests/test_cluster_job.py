"""The running job: its devices, and whether a description fits it."""

import re
from types import SimpleNamespace

import pytest

from paddle_rbt_plugin.cluster import check_job, detect_cluster, parse_cluster
from paddle_rbt_plugin.errors import ClusterError

paddle = pytest.importorskip("paddle")

HOSTS_4_4 = ",".join(f"10.0.0.{1 + rank // 4}:{6000 + rank % 4}" for rank in range(8))


@pytest.fixture
def cuda(monkeypatch):
    """A Paddle that sees one CUDA device of the given name; no GPU is at hand where tests run."""

    def see(name):
        monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
        monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(paddle.device.cuda, "get_device_properties", lambda: SimpleNamespace(name=name))

    return see


@pytest.mark.parametrize(
    ("environ", "short_form"),
    [
        ({}, "1x1:H100"),
        ({"PADDLE_TRAINERS_NUM": "8", "PADDLE_TRAINER_ENDPOINTS": HOSTS_4_4}, "2x4:H100"),
        ({"PADDLE_TRAINER_ENDPOINTS": HOSTS_4_4}, "2x4:H100"),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1,a:2,b:1"}, "1x2:H100+1x1:H100"),
        ({"PADDLE_TRAINERS_NUM": "4"}, "1x4:H100"),
        ({"PADDLE_TRAINERS_NUM": "16", "PADDLE_LOCAL_SIZE": "8"}, "2x8:H100"),
    ],
)
def test_the_job_has_one_device_per_process(cuda, environ, short_form):
    cuda("NVIDIA H100 80GB HBM3")
    assert detect_cluster(environ).short_form == short_form


def test_without_cuda_the_device_is_cpu(monkeypatch):
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: False)
    assert detect_cluster({"PADDLE_TRAINERS_NUM": "2"}).short_form == "1x2:CPU"


def test_the_environment_of_the_process_is_the_default(cuda, monkeypatch):
    cuda("NVIDIA H20")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "8")
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", HOSTS_4_4)
    assert detect_cluster().short_form == "2x4:H20"


def test_a_cuda_device_that_the_catalogue_lacks_is_an_error(cuda):
    cuda("Tesla T4")
    with pytest.raises(ClusterError, match=r"'Tesla T4' is not in the catalogue \(V100-16G, .*describe the cluster in a file"):
        detect_cluster({})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"PADDLE_TRAINERS_NUM": "4", "PADDLE_TRAINER_ENDPOINTS": "a:1,a:2"},
            "PADDLE_TRAINERS_NUM is 4, but PADDLE_TRAINER_ENDPOINTS names 2",
        ),
        ({"PADDLE_TRAINERS_NUM": "many"}, "PADDLE_TRAINERS_NUM is 'many'; it must be a whole number above zero"),
        ({"PADDLE_TRAINERS_NUM": "0"}, "it must be a whole number above zero"),
        ({"PADDLE_TRAINERS_NUM": "6", "PADDLE_LOCAL_SIZE": "4"}, "is not a multiple of PADDLE_LOCAL_SIZE"),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1,a:2"}, "the processes of host a are not consecutive"),
    ],
)
def test_an_environment_that_contradicts_itself_is_an_error(cuda, environ, message):
    cuda("NVIDIA H20")
    with pytest.raises(ClusterError, match=re.escape(message)):
        detect_cluster(environ)


def test_a_cluster_of_the_size_of_the_job_fits():
    check_job(parse_cluster("2x8:H100"), 16)


@pytest.mark.parametrize(
    ("cluster", "world_size", "right"),
    [
        ("2x8:A100-80G", 8, "1x8:A100-80G"),
        ("2x8:A100-80G", 4, "1x4:A100-80G"),
        ("1x2:CPU", 4, "2x2:CPU"),
        ("1x8:H100", 12, "1x8:H100+1x4:H100"),
    ],
)
def test_another_size_is_an_error_with_both_numbers_and_the_right_form(cluster, world_size, right):
    parsed = parse_cluster(cluster)
    message = f"the cluster {cluster} has {parsed.device_count} devices, but the running job has {world_size} processes"
    with pytest.raises(ClusterError, match=re.escape(message)) as caught:
        check_job(parsed, world_size)
    assert f"e.g. {right}, or" in str(caught.value)
    check_job(parse_cluster(right), world_size)
