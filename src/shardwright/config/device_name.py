"""The catalog device for a name in a table of runs: NVIDIA A100-SXM4-80GB, H100 SXM5, 8x V100 32GB, TPU v5p.

A name is a set of words. All words that identify a device (a100, pcie, 80g) must be words of one catalog entry: of its
name, its aliases and its names in the driver. Words of makers and of packaging are ignored.
"""

import re
from functools import lru_cache

from shardwright.config import catalog

_MAKERS = {"nvidia", "amd", "instinct", "tesla", "geforce", "quadro", "google", "cloud", "intel", "habana", "huawei"}
_PACKAGING = {"dgx", "hgx", "sxm", "oam", "nvlink", "gcd", "hbm", "hbm2", "hbm2e", "hbm3", "hbm3e"}
_ANY_DEVICE = {"ascend", "ampere", "hopper", "blackwell", "volta", "generation", "gpu", "gpus", "chip", "chips"}
_SAYS_NOTHING = frozenset(_MAKERS | _PACKAGING | _ANY_DEVICE | {"tensor", "core"})


def words_of(name: str) -> frozenset[str]:
    """The words of a device's name, in one spelling: {"a100", "sxm", "80g"} for A100-SXM4-80GB."""
    text = re.sub(r"^\s*\d+\s*[x*]\s*", "", name.lower())  # without the number of devices
    text = re.sub(r"(\d+)\s*gi?b?\b", r"\1g", text)  # 80 GB, 80GiB, 80G
    text = re.sub(r"\bsxm\d\b", "sxm", text)
    text = re.sub(r"\b(tpu|rtx|gtx)[\s_-]*(v?\d)", r"\1 \2", text)
    text = re.sub(r"\bv5\s+lite\b", "v5e", re.sub(r"\btrillium\b", "tpu v6e", text))
    return frozenset(re.findall(r"[a-z0-9]+", text))


@lru_cache(maxsize=64)
def device_name(name: str) -> str:
    """The catalog name of a device. KeyError with a way out if no entry has all of the words.

    If several entries have them, the entry with an alias of exactly these words is preferred, then the entry that
    shares most words.
    """
    entries = catalog.names("devices")
    if catalog.has("devices", name):
        return name
    device, memory_gib = catalog.split_memory(name)
    if memory_gib:
        return f"{device_name(device)}@{memory_gib}gib"
    name_words = words_of(name)
    essential = name_words - _SAYS_NOTHING
    devices = []
    for entry in entries:
        fields = catalog.read("devices", entry)
        spellings = [entry, *fields.get("aliases", ()), *fields.get("cuda_names", ())]
        is_alias = any(essential == words_of(alias) - _SAYS_NOTHING for alias in fields.get("aliases", ()))
        words = frozenset().union(*map(words_of, spellings))
        if essential and essential <= words:
            devices.append((not is_alias, -len(name_words & words), len(words), entry))
    if not devices:
        catalog.read("devices", name)  # raises KeyError with the nearest names
    return min(devices)[-1]


def catalog_device(device: str) -> str:
    """The name of the catalog entry for a device; if there is none, the name itself, whose fault a check reports."""
    if not device or device == "unknown" or catalog.is_file(device):
        return device
    try:
        return device_name(device)
    except KeyError:
        return device
