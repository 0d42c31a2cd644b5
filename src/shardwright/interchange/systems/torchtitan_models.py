"""The models that torchtitan knows by name and flavor, as models of the catalog or as fields of [model]."""

from collections.abc import Container
from functools import cache
from typing import Any

from shardwright.config import catalog
from shardwright.config.hugging_face.same_arithmetic import is_same
from shardwright.config.model import ModelSpec

_QWEN3 = {"head_dim": 128, "kv_heads": 8, "qk_norm": "head", "vocab": 151936, "rotary_base": 1e6, "norm_epsilon": 1e-6}
_DEEPSEEK_V3_IN_TORCHTITAN = {
    "mtp_layers": 0,
    "moe": {"aux_loss": "none", "aux_scope": "microbatch", "aux_coefficient": 0.01},
}


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> tuple[str, dict[str, Any]]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "tied_embeddings": tied}
    return "", _QWEN3 | shape


FLAVORS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("llama3", "8B"): ("llama3-8b", {}),
    ("llama3", "70B"): ("llama3-70b", {}),
    ("llama3", "405B"): ("llama3-405b", {}),
    ("llama2", "7B"): ("llama2-7b", {}),
    ("llama2", "13B"): ("llama2-13b", {}),
    ("llama2", "70B"): ("llama2-70b", {}),
    ("deepseek_v3", "671B"): ("deepseek-v3", _DEEPSEEK_V3_IN_TORCHTITAN),
    ("qwen3", "0.6B"): _qwen3(28, 1024, 16, 3072, tied=True),
    ("qwen3", "1.7B"): _qwen3(28, 2048, 16, 6144, tied=True),
    ("qwen3", "4B"): _qwen3(36, 2560, 32, 9728, tied=True),
    ("qwen3", "8B"): _qwen3(36, 4096, 32, 12288),
    ("qwen3", "14B"): _qwen3(40, 5120, 40, 17408),
    ("qwen3", "32B"): _qwen3(64, 5120, 64, 25600),
    ("qwen3", "30B-A3B"): ("qwen3-30b-a3b", {}),
    ("qwen3", "235B-A22B"): ("qwen3-235b-a22b", {"rotary_base": 5e6}),
}


def fields_of_flavor(name: str, flavor: str) -> dict[str, Any] | None:
    """Fields of [model] for a flavor; None if it is unknown."""
    attention_suffixes = ("_flex", "_varlen", "_flex_attn", "_varlen_attn")
    base_flavor = next(
        (flavor.removesuffix(suffix) for suffix in attention_suffixes if flavor.endswith(suffix)), flavor
    )
    flavor_fields = FLAVORS.get((name, base_flavor))
    if flavor_fields is None:
        return None
    catalog_name, fields = flavor_fields
    return ({"name": catalog_name} if catalog_name else {"name": f"{name}-{base_flavor}".lower()}) | fields


def flavor_of(model: ModelSpec, excluded_names: Container[str] = ()) -> tuple[str, str] | None:
    """The name and flavor of a model; None if torchtitan has no such model, or only under `excluded_names`."""
    return next((key for key in FLAVORS if key[0] not in excluded_names and is_same(_spec(*key), model)), None)


@cache
def _spec(name: str, flavor: str) -> ModelSpec:
    catalog_name, fields = FLAVORS[name, flavor]
    catalog_fields = catalog.read("models", catalog_name) if catalog_name else {}
    experts = catalog_fields.get("moe", {}) | fields.get("moe", {})
    merged = catalog_fields | fields | ({"moe": experts} if experts else {})
    return ModelSpec.model_validate(merged, strict=False)
