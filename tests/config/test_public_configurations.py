"""Public configurations with all their keys are read: as a model with its published parameters, or a refusal by name.

public_configurations.jsonl has a line each: the name on the Hub, the keys of config.json, and `parameters`, the count
that the files of the release have, where it is known, or `refused`, a part of the fault. Counts are without modules of
multi-token prediction, routers' correction biases and what is not the decoder of text.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.config.checks.check_model import model_faults
from shardwright.config.hugging_face.config_json import fields_of, notes_of
from shardwright.config.model import ModelSpec
from shardwright.sharding.stage_parameters import num_parameters

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "public_configurations.jsonl").read_text().splitlines()
]
READ = {row["name"]: row for row in ROWS if "refused" not in row}
REFUSED = {row["name"]: row for row in ROWS if "refused" in row}


def model_of(config: dict[str, Any]) -> ModelSpec:
    fields, faults = fields_of(config)
    assert not faults
    return ModelSpec.model_validate(fields)


@pytest.mark.parametrize("name", READ)
def test_a_public_configuration_is_a_model(name: str) -> None:
    model = model_of(READ[name]["config"])
    assert not model_faults(model)
    published = READ[name].get("parameters")
    assert published is None or num_parameters(model.model_copy(update={"mtp_layers": 0})) == published


@pytest.mark.parametrize("name", REFUSED)
def test_a_public_configuration_is_refused_by_name(name: str) -> None:
    _, faults = fields_of(REFUSED[name]["config"])
    assert len(faults) == 1 and REFUSED[name]["refused"] in faults[0]


def test_there_are_a_hundred_and_most_counts_are_known() -> None:
    assert len(READ) >= 100 and sum("parameters" in row for row in READ.values()) >= 70


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "vision_config of the model is not counted"),
        ("google/gemma-3-27b-it", "vision_config of the model is not counted"),
        ("Qwen/Qwen2-VL-7B-Instruct", "vision_config of the model is not counted"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "vision_config of the model is not counted"),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "vision_config of the model is not counted"),
        ("MiniMaxAI/MiniMax-M2", "config.json has mtp_transformer_layers, num_mtp_modules, use_mtp"),
        ("google/gemma-2-27b", "config.json has sliding_window_size, which nothing reads"),
        ("moonshotai/Kimi-K2-Instruct", "quantization_config is ignored"),
    ],
)  # fmt: skip
def test_keys_that_are_not_taken_are_noted(name: str, note: str) -> None:
    assert any(note in text for text in notes_of(READ[name]["config"]))


@pytest.mark.parametrize("name", READ)
def test_an_unknown_key_is_a_fault(name: str) -> None:
    """In the configuration of any family."""
    config = READ[name]["config"]
    section = next((key for key in ("text_config", "llm_config") if key in config), None)
    inner = config[section] if section else config
    changed = inner | {"num_memory_heads": 3}
    _, faults = fields_of(config | {section: changed} if section else changed)
    assert faults == [
        "num_memory_heads is 3, and it is not known what that does; remove it if it changes nothing of what the layers "
        "compute"
    ]
