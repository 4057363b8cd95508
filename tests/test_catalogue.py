"""The device catalogue: figures, sources, and names that CUDA gives the devices."""

import pytest

from paddle_rbt_plugin.cluster import catalogue, find_device, recognise
from paddle_rbt_plugin.errors import ClusterError

NAMES = ("V100-16G", "V100-32G", "A100-40G", "A100-80G", "A800-80G", "H100", "H800", "H20", "H200", "B200", "CPU")
NVLINK = {
    "V100-16G": 150, "V100-32G": 150, "A100-40G": 300, "A100-80G": 300, "A800-80G": 200,
    "H100": 450, "H800": 200, "H20": 450, "H200": 450, "B200": 900,
}  # fmt: skip


def test_the_catalogue_has_the_names_of_the_contract():
    assert tuple(catalogue()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name):
    stated = {"software"} if catalogue()[name].machine.device.software else set()
    assert {key for key, text in catalogue()[name].sources if text} == {"tflops", "memory", "intra_link", "nic"} | stated


@pytest.mark.parametrize(("name", "gigabytes"), NVLINK.items())
def test_nvlink_is_counted_in_one_direction(name, gigabytes):
    assert catalogue()[name].machine.intra_link.bandwidth == gigabytes * 1e9


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("V100-32G", "fp16", 125),
        ("A100-80G", "bf16", 312),
        ("H100", "bf16", 989.4),
        ("H20", "fp8", 296),
        ("B200", "bf16", 2250),
    ],
)
def test_rates_are_dense(name, precision, tflops):
    assert catalogue()[name].machine.device.flops(precision) == tflops * 1e12


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("H", "B"))])
def test_tensor_core_rates_double_from_tf32_to_fp16_to_fp8(name):
    device = catalogue()[name].machine.device
    assert device.flops("fp16") == device.flops("bf16") == pytest.approx(2 * device.flops("tf32"), rel=0.03)
    assert device.flops("fp8") == pytest.approx(2 * device.flops("fp16"), rel=0.001)


def test_a_dgx_a100_sends_200_gigabytes_per_second():
    assert catalogue()["A100-80G"].machine.inter_link.bandwidth == 200e9


def test_a_precision_that_the_device_lacks_is_an_error():
    with pytest.raises(ClusterError, match="V100-32G has no bf16; it computes in fp32, fp16"):
        find_device("v100-32g").machine.device.flops("bf16")


def test_an_unknown_device_gets_the_close_ones_and_all_names():
    with pytest.raises(ClusterError, match=r"did you mean A100-40G or A100-80G\? known: V100-16G, .*, CPU"):
        find_device("A100")
    with pytest.raises(ClusterError, match="did you mean A100-80G"):
        find_device("A100-80GB")


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("Tesla V100-SXM2-16GB", "V100-16G"),
        ("Tesla V100-SXM3-32GB", "V100-32G"),
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("A100-SXM4-80GB", "A100-80G"),
        ("Tesla A100-SXM-80GB", "A100-80G"),
        ("NVIDIA A800-SXM4-80GB", "A800-80G"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H10080GB", "H100"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20102GB", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200150GB", "H200"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_names_that_cuda_and_paddle_give_are_recognised(product, name):
    assert recognise(product) is catalogue()[name]


@pytest.mark.parametrize(
    "product",
    [
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA GB200",
        "NVIDIA H200 MIG 1g.18gb",
        "Tesla T4",
    ],
)
def test_other_cards_are_not_taken_for_known_ones(product):
    assert recognise(product) is None


def test_a_smaller_machine_has_network_cards_in_proportion():
    entry = catalogue()["A100-80G"]
    assert [entry.group(1, n).nics for n in (1, 2, 4, 8, 16)] == [1, 2, 4, 8, 8]
    assert catalogue()["V100-32G"].group(1, 1).nics == 1
