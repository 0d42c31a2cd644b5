"""Settings of adapters and of bases in 4 bits over models with experts: read where all releases mean the same, and else
asked for."""

import json
from typing import Any

import pytest

from interchange.test_adapter_settings import AXOLOTL, CONFIG, FACTORY, TRL
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked
from shardwright.interchange.system import SOURCES

SHAPE = json.loads(CONFIG)
MIXTRAL = SHAPE | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
                   "num_experts_per_tok": 2}  # fmt: skip
QWEN = SHAPE | {
    "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128, "decoder_sparse_step": 1,
}  # fmt: skip
ATTENTION, EXPERTS = ("query", "key", "value", "out"), ("expert_gate", "expert_up", "expert_down")


def read(system: str, text: str, model: dict[str, Any], *sets: str) -> JobSpec:
    asked = Asked(overrides=sets, cluster=AskedCluster(8, "h100-sxm"))
    texts = {"job.yaml": text, "config.json": json.dumps(model)}
    return job_of_texts(SOURCES[system], texts, asked, "a test").job


def faults(*arguments: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        read(*arguments)
    return caught.value.faults


LORA, QLORA = "adapter: lora\nlora_r: 8\nlora_alpha: 16\n", "adapter: qlora\nload_in_4bit: true\nlora_r: 8\n"
BY_NAME = "lora_target_modules: [q_proj, k_proj, v_proj, o_proj, {}]\n"
NAMED = {
    "mixtral": (MIXTRAL, "w1, w2, w3", (*ATTENTION, *EXPERTS)),
    "mixtral by names of others": (MIXTRAL, "gate_proj, up_proj, down_proj", ATTENTION),
    "qwen by names of mixtral": (QWEN, "w1, w2, w3", ATTENTION),
    "mixtral down": (MIXTRAL, "w2", (*ATTENTION, "expert_down")),
    "qwen": (QWEN, "gate_proj, up_proj, down_proj", (*ATTENTION, "gate", "up", "down", *EXPERTS)),
    "dense": (SHAPE, "gate_proj, up_proj, down_proj", (*ATTENTION, "gate", "up", "down")),
}


@pytest.mark.parametrize("name", NAMED)
def test_modules_named_one_by_one_are_those_of_experts_too(name: str) -> None:
    model, modules, targets = NAMED[name]
    assert read("axolotl", AXOLOTL + LORA + BY_NAME.format(modules), model).model.adapter.targets == targets


ALL = {
    "axolotl": ("axolotl", AXOLOTL + LORA + "lora_target_linear: true\n", "lora_target_linear = True"),
    "llamafactory": ("llamafactory", FACTORY + "finetuning_type: lora\nlora_target: all\n", "lora_target = all"),
    "llamafactory by default": ("llamafactory", FACTORY + "finetuning_type: lora\n", "finetuning_type = lora"),
    "trl": ("trl", TRL + "use_peft: true\nlora_target_modules: all-linear\n", "lora_target_modules = all-linear"),
}


@pytest.mark.parametrize("name", ALL)
def test_adapters_of_all_linear_modules_are_asked_for_beside_experts(name: str) -> None:
    system, text, setting = ALL[name]
    assert read(system, text, SHAPE).model.adapter.targets == (*ATTENTION, "gate", "up", "down")
    for model, beside in ((MIXTRAL, ATTENTION), (QWEN, (*ATTENTION, "gate", "up", "down"))):
        (fault,) = faults(system, text, model)
        assert fault.startswith(f"{setting}: experts are linear modules in transformers 4")
        for targets in (beside, (*beside, *EXPERTS)):
            way_out = f"model.adapter.targets=[{','.join(targets)}]"
            assert f"--set {way_out}" in fault
            assert read(system, text, model, way_out).model.adapter.targets == targets


IN_4_BITS = {
    "axolotl": ("axolotl", AXOLOTL + QLORA + "lora_target_modules: [q_proj]\n", "load_in_4bit = True"),
    "llamafactory": ("llamafactory", FACTORY + "quantization_bit: 4\nlora_target: q_proj\n", "quantization_bit = 4"),
    "trl": ("trl", TRL + "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\n", "load_in_4bit = True"),
}


@pytest.mark.parametrize("name", IN_4_BITS)
def test_a_base_in_4_bits_is_asked_for_beside_experts(name: str) -> None:
    system, text, setting = IN_4_BITS[name]
    assert read(system, text, SHAPE).model.adapter.base == "nf4"
    (fault,) = faults(system, text, MIXTRAL)
    assert fault.startswith(f"{setting}: experts that are linear modules (transformers 4) are quantised")
    assert read(system, text, MIXTRAL, "model.adapter.base=nf4").model.adapter.base == "nf4"
    none = "model.adapter.base=compute", "model.adapter.double_quantization=false"
    assert all(f"--set {way_out}" in fault for way_out in none)
    assert read(system, text, MIXTRAL, *none).model.adapter.base == "compute"


def test_experts_that_a_setting_quantises_are_in_nf4() -> None:
    text = AXOLOTL + QLORA + "lora_target_modules: [q_proj]\nquantize_moe_experts: {}\n"
    assert read("axolotl", text.format("true"), MIXTRAL).model.adapter.base == "nf4"
    assert len(faults("axolotl", text.format("false"), MIXTRAL)) == 1


def test_all_faults_of_such_files_are_in_one_list() -> None:
    assert len(faults("axolotl", AXOLOTL + QLORA + "lora_target_linear: true\n", MIXTRAL)) == 2
    router = faults("axolotl", AXOLOTL + LORA + BY_NAME.format("gate, w1"), MIXTRAL)
    assert any("names gate, and adapters are of" in fault for fault in router)
