"""Names of devices in tables of runs are found in the catalog, and nothing that is not there."""

import pytest

from shardwright.config import catalog
from shardwright.config.device_name import device_name, words_of


@pytest.mark.parametrize(
    ("stated_name", "meant"),
    [
        ("A100", "a100-sxm-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80g"),
        ("A100 40GB", "a100-sxm-40g"),
        ("8x A100 80 GB SXM4", "a100-sxm-80g"),
        ("A100-80GB PCIe", "a100-pcie-80g"),
        ("H100 SXM5", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 96GB HBM2e", "h100-hbm2e-96g"),
        ("H100 PCIe", "h100-pcie"),
        ("H200 141GB", "h200-sxm"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16g"),
        ("V100", "v100-sxm-32g"),
        ("GB200 NVL72", "gb200-nvl72"),
        ("AMD Instinct MI300X", "mi300x"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("RTX A6000", "rtx-a6000"),
        ("TPU v5p", "tpu-v5p"),
        ("Google Cloud TPUv4", "tpu-v4"),
        ("Ascend 910B", "ascend-910b"),
    ],
)
def test_a_device_by_many_names(stated_name: str, meant: str) -> None:
    assert device_name(stated_name) == meant


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_a_device_answers_to_its_own_names(name: str) -> None:
    fields = catalog.read("devices", name)
    for printed in [name, name.upper(), *fields["aliases"], *fields["cuda_names"]]:
        assert device_name(printed) == name


@pytest.mark.parametrize("stated_name", ["abacus", "A1000", "H100 480GB", "RTX 4080", "NVIDIA", "", "B20"])
def test_no_device_is_guessed(stated_name: str) -> None:
    with pytest.raises(KeyError, match="is not in the catalog of devices"):
        device_name(stated_name)


def test_words() -> None:
    assert words_of("2 x A100-SXM4-80 GiB") == words_of("a100 sxm 80g") == {"a100", "sxm", "80g"}
