"""Convert a config.json, or a model's folder that has one, to fields of [model].

The key model_type gives the family. Missing keys have the family's own default (defaults.toml), because files written
by transformers have only the keys that differ from the defaults.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from shardwright.config.base import PlanError, error_text, shortened
from shardwright.config.catalog import written_alike
from shardwright.config.hugging_face import (
    hunyuan,
    like_llama,
    older,
    with_experts,
    with_latents,
    with_layer_norm,
    with_own_code,
)
from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import Fields
from shardwright.config.hugging_face.refused import refusal_of
from shardwright.config.phrase import any_of, say
from shardwright.config.toml_file import value_faults
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_text, system_reason

CONFIG, ADAPTER = "config.json", "adapter_config.json"  # of a model, and of an adapter that peft trained for one
MERGE = say("an adapter (LoRA) and no model; merge it into its model, and name that")
USUAL_SEQUENCE = 4096  # tokens of a sample, for models that accept longer sequences
_MOST_BYTES = 4 * MIB
_MISSPELT = 0.85  # similarity from which a word may be a misspelt other word

FAMILIES: Mapping[str, Callable[[ConfigReader], Fields]] = {
    "arcee": like_llama.arcee, "baichuan": with_own_code.baichuan, "biogpt": older.biogpt, "bloom": older.bloom,
    "chatglm": with_own_code.chatglm, "cohere": with_layer_norm.cohere, "cohere2": with_layer_norm.cohere2,
    "cwm": like_llama.cwm, "deepseek": with_own_code.deepseek, "deepseek_v2": with_experts.deepseek_v2,
    "deepseek_v3": with_experts.deepseek_v3, "dots1": with_experts.dots1, "ernie4_5": like_llama.ernie,
    "ernie4_5_moe": with_experts.ernie_moe, "exaone": with_own_code.exaone, "exaone4": like_llama.exaone4,
    "exaone_moe": with_experts.exaone_moe, "falcon": older.falcon, "flex_olmo": with_experts.flex_olmo,
    "gemma": like_llama.gemma, "gemma2": like_llama.gemma2, "gemma3_text": like_llama.gemma3, "glm": like_llama.glm,
    "glm4": like_llama.glm4, "glm4_moe": with_experts.glm4_moe, "glm4_moe_lite": with_experts.glm4_moe_lite,
    "gpt2": older.gpt2, "gpt_bigcode": older.gpt_bigcode, "gpt_neox": older.gpt_neox, "gpt_oss": with_experts.gpt_oss,
    "gptj": with_layer_norm.gptj, "granite": like_llama.granite, "granite_swa": like_llama.granite_swa,
    "granitemoe": with_experts.granite_moe, "granitemoe_swa": with_experts.granite_moe_swa,
    "granitemoehybrid": like_llama.granite_hybrid, "granitemoeshared": with_experts.granite_moe_shared,
    "helium": like_llama.helium, "hunyuan_v1_dense": hunyuan.hunyuan_dense, "hunyuan_v1_moe": hunyuan.hunyuan_moe,
    "hy_v3": with_experts.hy_v3, "hyperclovax": like_llama.hyperclovax, "internlm": with_own_code.internlm,
    "internlm2": with_own_code.internlm2, "internlm3": like_llama.internlm3, "iquestcoder": like_llama.llama,
    "jais2": with_layer_norm.jais2, "kimi_k2": with_experts.deepseek_v3, "llama": like_llama.llama,
    "llama4_text": with_experts.llama4, "mellum": with_experts.mellum, "mimo": with_own_code.mimo,
    "minicpm": with_own_code.minicpm, "minimax_m2": with_experts.minimax_m2, "ministral": like_llama.ministral,
    "ministral3": like_llama.ministral3, "mistral": like_llama.mistral, "mixtral": with_experts.mixtral,
    "mpt": older.mpt, "nemotron": with_layer_norm.nemotron, "olmo": like_llama.olmo, "olmo2": like_llama.olmo2,
    "olmo3": like_llama.olmo3, "olmoe": with_experts.olmoe, "opt": older.opt, "orion": with_own_code.orion,
    "phi": with_layer_norm.phi, "phi3": like_llama.phi3, "qwen": with_own_code.qwen, "qwen2": like_llama.qwen2,
    "qwen2_moe": with_experts.qwen2_moe, "qwen3": like_llama.qwen3, "qwen3_moe": with_experts.qwen3_moe,
    "seed_oss": like_llama.seed_oss, "smollm3": like_llama.smollm3, "solar_open": with_experts.solar_open,
    "stablelm": with_layer_norm.stablelm, "starcoder2": older.starcoder2, "vaultgemma": like_llama.vaultgemma,
    "youtu": with_latents.youtu,
}  # fmt: skip
_LIKE = {"kimi_k2": "deepseek_v3"}  # families with the defaults of another
# Models with several kinds of input, and their decoders' own names -> the family of the decoder of text.
_DECODERS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_audio": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
# Of decoders that compute the same whatever their configuration says: the keys of their family that say it.
_FIXED_KEYS: Mapping[str, Mapping[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
_NUMBERS_OF_POSITIONS = ("n_positions", "max_position_embeddings")
_TIED = "tie_word_embeddings"
_DRAFT = re.compile(r"(?i)eagle\d*$|draft|medusa|speculator|^dflash")  # classes of speculative decoding
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config")


def names_config(name: str) -> bool:
    """True if a model's name is the path of a config.json or of a folder that has one."""
    try:
        return name.endswith(".json") or (Path(name) / CONFIG).is_file()
    except (OSError, ValueError):
        return False


def read_model(name: str) -> Fields:
    """Fields of [model], including its name, from a config.json or a folder. Raises PlanError with every fault."""
    path = path_of(name)
    keys = read_keys(path)
    fields, faults = fields_of(keys)
    if faults:
        family = shortened(family_of(keys)) or say("no family")
        raise PlanError(say("{path} ({family})", path=str(path), family=family), faults)
    return {"name": _model_name(path)} | fields


def path_of(name: str) -> Path:
    """The config.json of a name: the name itself, or the file in the folder of that name."""
    return Path(name) if name.endswith(".json") else Path(name, CONFIG)


def is_adapter(folder: str | Path) -> bool:
    """True if a folder has an adapter (LoRA), which is no model by itself."""
    return os.path.exists(os.path.join(folder, ADAPTER))


def family_of(keys: dict[str, Any]) -> str:
    """The family in a configuration, that of the text decoder if the model has several kinds of input; "" if none."""
    family = text_keys(keys).get("model_type")
    return _DECODERS.get(family, family) if isinstance(family, str) else ""


def is_decoder_alone(keys: dict[str, Any]) -> bool:
    """True if a configuration is of a decoder of text, not of a model with several kinds of input."""
    return keys.get("model_type") in FAMILIES


def fields_of(keys: dict[str, Any]) -> tuple[Fields, list[str]]:
    """(fields of [model], faults) of a configuration."""
    classes = keys.get("architectures")
    drafts = [name for name in classes if _DRAFT.search(str(name))] if isinstance(classes, list) else []
    keys, family = text_keys(keys), family_of(keys)
    if family not in FAMILIES:
        return {}, [_family_fault(family)]
    if drafts:
        return {}, [_draft_fault(str(drafts[0]))]
    reader, fields = _read(keys, family)
    longest = fields["sequence"]
    if fields.get("positions") != "learned":
        fields |= {"longest_sequence": longest, "sequence": min(longest, USUAL_SEQUENCE)}
    return fields, reader.all_faults()


def _read(keys: dict[str, Any], family: str) -> tuple[ConfigReader, Fields]:
    reader = ConfigReader(keys, dict(_defaults().get(_LIKE.get(family, family), {})))
    return reader, FAMILIES[family](reader)


def positions_key(keys: dict[str, Any]) -> str:
    """The key that a family reads the number of learned positions from; empty if its positions are not learned."""
    reader, fields = _read(text_keys(keys), family_of(keys))
    names = [name for name in _NUMBERS_OF_POSITIONS if name in reader.names_read]
    return names[0] if names and fields.get("positions") == "learned" else ""


def notes_of(keys: dict[str, Any]) -> list[str]:
    """Notes on keys of a configuration that are not taken, without full stops; empty if its family is unknown."""
    family = family_of(keys)
    return _read(text_keys(keys), family)[0].notes() if family in FAMILIES else []


def notes_on(name: str) -> list[str]:
    """Notes on keys that are not taken of the config.json of a name, if it is one that can be read."""
    try:
        return notes_of(read_keys(path_of(name))) if names_config(name) else []
    except PlanError:
        return []


def read_keys(path: Path) -> dict[str, Any]:
    """All keys of a config.json. Raises PlanError."""
    try:
        keys = json.loads(read_text(path, _MOST_BYTES, "config.json"))
    except FileFault as error:
        raise PlanError(str(path), [error_text(error)]) from None
    except OSError as error:
        raise PlanError(
            str(path), [say("it can't be read: {reason}; check the path", reason=system_reason(error))]
        ) from None
    except (ValueError, RecursionError) as error:
        reason = shortened(str(error), 200)
        raise PlanError(str(path), [say("it is not valid JSON: {reason}; mend it", reason=reason)]) from None
    if not isinstance(keys, dict):
        raise PlanError(str(path), [say("it is JSON, and no object of keys and values as a config.json is")])
    if faults := value_faults(keys):
        raise PlanError(str(path), faults)
    return keys


def text_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of the text decoder; a model with several kinds of input has them in a section of their own."""
    inner = next((keys[name] for name in _TEXT_SECTIONS if isinstance(keys.get(name), dict)), None)
    if inner is None:
        return _without_places_of_images(keys)
    outer_names = (_TIED, "quantization_config", *(name for name in keys if name.endswith("_config")))
    outer = {name: keys[name] for name in outer_names if name in keys and name not in _TEXT_SECTIONS}
    fixed = dict(_FIXED_KEYS.get(str(inner.get("model_type")), {}))
    # In classes of transformers, whose section has the first of these names, the head is outside of the decoder.
    if _TIED in outer and isinstance(keys.get(_TEXT_SECTIONS[0]), dict):
        fixed[_TIED] = outer[_TIED]
    return _without_places_of_images(outer | inner | fixed)


def _without_places_of_images(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys with rotary positions as text has them: its three places of a token (mrope) are one."""
    changed = dict(keys)
    for name in ("rope_scaling", "rope_parameters"):
        section = keys.get(name)
        if isinstance(section, dict) and "mrope_section" in section:
            inner = {key: value for key, value in section.items() if not key.startswith("mrope")}
            changed[name] = {key: "default" if value == "mrope" else value for key, value in inner.items()}
    return changed


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    """The defaults of each family for keys that a configuration leaves out."""
    return tomllib.loads((resources.files(__package__) / "defaults.toml").read_text(encoding="utf-8"))


def _model_name(path: Path) -> str:
    """The name of a model: that of its folder, or of a file with another name than config.json."""
    return path.absolute().parent.name or "model" if path.name == CONFIG else path.stem


def _draft_fault(name: str) -> str:
    return say(
        "architectures names {name}, which drafts tokens beside another model, whose hidden states it takes; name the "
        "config.json of that model",
        name=shortened(name),
    )


def _family_fault(family: str) -> str:
    if not family:
        return say('it has no model_type, which says what the layers compute; add it, such as "llama"')
    if refusal := refusal_of(family):
        return say(
            "model_type {family} can't be expressed by the decoder here: {reason}; {hint}",
            family=repr(family),
            reason=refusal[0],
            hint=refusal[1],
        )
    # A name that differs in a number, or that goes on, is often another family, not a misspelling.
    digits = re.findall(r"\d", family)
    alike = written_alike(family, sorted(FAMILIES), share=_MISSPELT)
    near = [name for name in alike if re.findall(r"\d", name) == digits and not family.startswith(name)]
    return say(
        "model_type {family} can't be expressed by the decoder here; {hint}",
        family=repr(shortened(family)),
        hint=say("did you mean {meant}?", meant=any_of(near))
        if near
        else say("use one of {names}", names=tuple(sorted(FAMILIES))),
    )
