"""Configurations of Hugging Face's: all of one is understood, or what is not is named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.configurations import invented, miscounted, overlooked
from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import _LIKE, FAMILIES, _defaults, fields_of, read_model
from shardwright.config.hugging_face.refused import REASONS, refusal_of, refused_families
from shardwright.config.hugging_face.same_arithmetic import is_same
from shardwright.config.hugging_face.written_config import written_config
from shardwright.config.load import load_job, read_job
from shardwright.config.model import ModelSpec
from support.released_models import OWN_CODE, RELEASED, no_tokens

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 128, "num_key_value_heads": 2,
}  # fmt: skip

# Of transformers'; and Granite 4, whose own defaults are Mamba, which is refused.
WITHOUT_A_CLASS = {"kimi_k2", "granitemoehybrid", *(model.family for model in OWN_CODE.values())}


def full_keys(family: str, keys: dict[str, Any]) -> dict[str, Any]:
    """All keys of a configuration as transformers knows it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family](**(no_tokens(family) | keys))
    return json.loads(json.dumps(config.to_dict())) | {"model_type": family}


def test_windows_of_two_kinds_are_a_fault() -> None:
    """The kind of the first one was taken for all."""
    kinds = ["sliding_attention", "chunked_attention"] * 2
    keys = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    assert fields_of(keys | {"layer_types": ["sliding_attention"] * 4})[1] == []
    _, faults = fields_of(keys | {"layer_types": kinds})
    assert len(faults) == 1 and "layer_types has chunked_attention and sliding_attention" in faults[0]


def test_every_family_has_defaults() -> None:
    """Without them a key that is left out would be 0."""
    assert all(_defaults().get(_LIKE.get(family, family)) for family in FAMILIES)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_A_CLASS])
def test_what_is_left_out_is_what_transformers_takes(family: str) -> None:
    nothing, faults = fields_of({"model_type": family})
    assert not faults
    everything, faults = fields_of(full_keys(family, {}))
    everything.pop("mtp_layers", 0)  # these are taken where they are named alone
    assert not faults and is_same(ModelSpec.model_validate(nothing), ModelSpec.model_validate(everything))


@pytest.mark.parametrize("name", RELEASED)
def test_a_model_is_written_as_it_is_read(name: str) -> None:
    family, keys = RELEASED[name]
    fields, faults = fields_of(full_keys(family, keys))
    assert not faults
    model = ModelSpec.model_validate(fields)
    _, written = written_config(model)
    again, faults = fields_of(written)
    assert not faults and is_same(ModelSpec.model_validate(again), model)


def test_only_models_of_a_family_are_written() -> None:
    odd = ModelSpec(norm="layernorm", gated_mlp=False, activation="relu2", sinks=True)
    with pytest.raises(PlanError, match="no family of Hugging Face's has these layers"):
        written_config(odd)


FAULTS = {
    "hidden_act is 'tanh', which can't be expressed": {"hidden_act": "tanh"},
    "num_hidden_layers is 'four', and should be a whole number": {"num_hidden_layers": "four"},
    "rms_norm_eps is nan, and should be a number": {"rms_norm_eps": float("nan")},
    "mystery is 3, and it is not known what that does": {"mystery": 3},
    "rope_parameters: rope_type is 'spiral', which can't be expressed": {"rope_scaling": {"rope_type": "spiral"}},
    "partial_rotary_factor makes 8 of the 16 elements of a head turn": {"partial_rotary_factor": 0.5},
    "model_type 'lama' can't be expressed by the decoder here; did you mean llama?": {"model_type": "lama"},
    "it has no model_type": {"model_type": None},
}


# Of other families: what only some of the values of a key say can be expressed.
FAMILY_FAULTS = {
    "rope_interleave is false: pairs that turn are neighbours": ("deepseek_v3", {"rope_interleave": False}),
    "mlp_bias is true: the experts have no biases": ("deepseek_v2", {"mlp_bias": True}),
    "num_attention_heads 20 x head_dim 64 = 1280, and should be hidden_size 2560": ("helium", {"head_dim": 64}),
    "layer_types has layers without windows, and in this family all have one": (
        "mistral", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "shared_intermediate_size is 64, and it is not known what that does": (
        "granitemoe", {"shared_intermediate_size": 64},
    ),
    "head_dim is 3: positions turn qk_rope_head_dim": ("deepseek_v3", {"head_dim": 3}),
    "experts of no group can't be chosen": ("deepseek_v3", {"topk_group": 0}),
    "hidden_activation is 'silu': Gemma has the tanh form": ("gemma3_text", {"hidden_activation": "silu"}),
    "hidden_activation is 'gelu': Gemma has the tanh form": ("gemma2", {"hidden_activation": "gelu"}),
    "hidden_act is 'relu': Gemma has the tanh form": ("gemma", {"hidden_act": "relu"}),
    "sliding_attention has positions that are stretched (rope_type linear)": (
        "gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 4.0}}},
    ),
    "attn_temperature_tuning is 'on', and should be true, false or a whole number": (
        "llama4_text", {"attn_temperature_tuning": "on"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("setting", FAMILY_FAULTS)
def test_what_a_family_cannot_say_is_named(setting: str) -> None:
    family, keys = FAMILY_FAULTS[setting]
    assert any(setting in fault for fault in fields_of({"model_type": family, **keys})[1])


def test_positions_that_a_user_stretches_are_stretched() -> None:
    """transformers takes rope_scaling where a file has rope_parameters too."""
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    fields, faults = fields_of(LLAMA | {"rope_parameters": plain, "rope_scaling": stretched, "rope_theta": 500.0})
    assert not faults and fields["rotary_base"] == 500.0
    assert fields["rotary_scaling"]["kind"] == "yarn" and fields["rotary_scaling"]["trained_sequence"] == 1024


def test_yarn_scales_scores_in_families_of_deepseek_alone() -> None:
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    for both, magnitude in ((1.0, 1.0), (0.5, (1 + 0.1 * math.log(40)) / (1 + 0.05 * math.log(40)))):
        keys = {"rope_parameters": yarn | {"mscale_all_dim": both}}
        plain = ModelSpec.model_validate(fields_of(LLAMA | keys)[0])
        latent = ModelSpec.model_validate(fields_of({"model_type": "deepseek_v3"} | keys)[0])
        assert plain.rotary_scaling.temperature == 1.0 and latent.rotary_scaling.temperature > 1.1
        assert plain.rotary_scaling.turned_magnitude == pytest.approx(magnitude)


def test_keys_as_they_were_released() -> None:
    tuned, faults = fields_of({"model_type": "llama4_text", "attn_temperature_tuning": 4, "floor_scale": 8192})
    assert not faults and tuned["temperature_tuning"]["floor"] == 8192
    assert "temperature_tuning" not in fields_of({"model_type": "llama4_text", "attn_temperature_tuning": 0})[0]
    assert fields_of({"model_type": "gemma", "hidden_act": "gelu"})[0]["activation"] == "gelu-tanh"


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3", "qwen3_moe windows"])
def test_no_key_that_changes_what_is_computed_is_overlooked(name: str) -> None:
    """`python tests/fuzz/configurations.py` asks all families."""
    assert not list(overlooked(name))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", RELEASED)
def test_a_model_that_is_accepted_has_all_parameters(name: str) -> None:
    """Parameters are those of transformers' model, with each key as it is and changed."""
    assert not list(miscounted(name))


@pytest.mark.sampled(32)
@pytest.mark.parametrize("name", RELEASED)
def test_keys_that_a_configuration_lacks_change_both_or_neither(name: str) -> None:
    assert not list(invented(name))


@pytest.mark.parametrize("setting", FAULTS)
def test_what_cannot_be_expressed_is_named(setting: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | FAULTS[setting]))
    with pytest.raises(PlanError) as caught:
        read_model(str(tmp_path))
    assert setting in str(caught.value)


def test_each_family_of_transformers_is_read_or_refused_with_a_reason() -> None:
    """Models with several kinds of input, whose decoder of text is read, are neither."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = {name: CONFIG_MAPPING_NAMES[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    named = {"gpt2" if config == "GPT2Config" else name for name, config in classes.items()}
    rest = {name for name in named if name not in FAMILIES and refusal_of(name) is None}
    assert rest == {"gemma3", "llama4"}
    assert not set(refused_families()) & set(FAMILIES) and set(refused_families().values()) == set(REASONS)
    (fault,) = fields_of({"model_type": "bamba"})[1]
    assert fault.startswith("model_type 'bamba' can't be expressed by the decoder here: its layers have state spaces (")


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_way_out_of_an_indexer_is_one(family: str) -> None:
    keys = full_keys(family, {})
    (fault,) = fields_of(keys)[1]
    assert (
        'set model_type to "deepseek_v3", and leave out layer_types, mlp_layer_types and the keys that begin' in fault
    )
    left_out = ("layer_types", "mlp_layer_types")
    rest = {name: keys[name] for name in keys if name not in left_out and not name.startswith("index")}
    fields, faults = fields_of(rest | {"model_type": "deepseek_v3"})
    assert not faults and fields["layers"] == keys["num_hidden_layers"] and fields["moe"]["first_dense"] == 3


def test_windows_follow_a_rule_or_are_named() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    keys = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    assert "windows in layers [0, 3]" in fields_of(keys)[1][0]
    fields, faults = fields_of(keys | {"layer_types": [*kinds[1:3], "sliding_attention", "sliding_attention"]})
    assert not faults and fields["window"] == {"size": 8, "first_full": 2}


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 10_000, '{"a": 1e999}', "{" + '"a":{' * 50 + "}" * 51, "\0"])
def test_no_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError, match=r"config\.json"):
        read_model(str(tmp_path))


VALUES = (
    st.sampled_from([0, -1, 1e-320, 10**400])
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=3)
)


@given(st.sampled_from(sorted(FAMILIES)), st.data())
def test_any_values_are_read_or_refused(family: str, data: st.DataObject) -> None:
    """Whatever stands in a key, there are fields and faults, and no other error."""
    from shardwright.config.hugging_face.config_json import _defaults

    known = sorted(_defaults()["deepseek_v3" if family == "kimi_k2" else family])
    keys = data.draw(st.dictionaries(st.sampled_from([*known, "layer_types", "rope_scaling", "x"]), VALUES, max_size=4))
    fields, faults = fields_of({"model_type": family, **keys})
    assert isinstance(fields, dict) and all(isinstance(fault, str) for fault in faults)


def test_a_folder_is_a_model_and_a_job(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama-mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 131072}))
    asked = ["cluster.device=h100-sxm", "cluster.devices_per_node=8"]
    assert read_job(str(folder), asked).is_model
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "tiny-llama-mine"\nsequence = 64\n')
    model = load_job(str(job)).model
    assert (model.name, model.layers, model.sequence, model.longest_sequence) == ("tiny-llama-mine", 4, 64, 131072)
    job.write_text('[model]\nweights = "tiny-llama-mine"\n')
    model = load_job(str(job)).model
    assert (model.layers, model.sequence, model.weights) == (4, 4096, str(folder))


MINIMAX = {"model_type": "minimax_m2", "num_hidden_layers": 2, "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192}


@pytest.mark.parametrize(
    ("keys", "num_faults"),
    [
        (MINIMAX | {"layernorm_full_attention_beta": 1.0, "shared_moe_mode": "sigmoid"}, 0),
        (MINIMAX | {"layernorm_mlp_beta": 3.5}, 1),
        ({"model_type": "dots1", "num_hidden_layers": 2, "topk_method": "noaux_tc", "scoring_func": "noaux_tc"}, 0),
        ({"model_type": "dots1", "num_hidden_layers": 2, "topk_method": "greedy"}, 1),
        ({"model_type": "phi", "num_hidden_layers": 2, "rotary_dim": 32}, 0),  # half of a head of 64
        ({"model_type": "phi", "num_hidden_layers": 2, "rotary_dim": 48}, 1),
        ({"model_type": "llama", "internal_version": "7b-alpha", "license": "mit", "model_name": "mine"}, 0),
        ({"model_type": "llama", "internal_version": 2, "hidden_dropout": 0.0}, 1),
        ({"model_type": "llama", "hidden_dropout": 0.1}, 1),
    ],
)
def test_keys_of_earlier_revisions_are_read_where_they_change_nothing(keys: dict[str, Any], num_faults: int) -> None:
    assert len(fields_of(keys)[1]) == num_faults
