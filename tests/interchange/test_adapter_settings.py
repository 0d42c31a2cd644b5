"""Settings of adapters, as trainers over peft say them."""

import json
from typing import Any

import pytest

from shardwright.config.adapter import TARGETS
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.software import software_of
from shardwright.interchange.exported import Lacking, exported
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked
from shardwright.interchange.meaning import differences
from shardwright.interchange.system import SOURCES, SYSTEMS

CONFIG = json.dumps(
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
     "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 96,
     "max_position_embeddings": 4096, "tie_word_embeddings": False}
)  # fmt: skip
COMMON = "output_dir: out\nlearning_rate: 1.0e-4\nmax_steps: 30\nbf16: true\n"
FACTORY = (
    "model_name_or_path: x/y\nstage: sft\ndo_train: true\ncutoff_len: 64\nper_device_train_batch_size: 1\n"
    "template: default\ndataset: letters\n" + COMMON
)
AXOLOTL = "base_model: x/y\nsequence_len: 64\nmicro_batch_size: 2\noptimizer: adamw_torch\n" + COMMON
TRL = "model_name_or_path: x/y\ndataset_name: letters\nmax_length: 64\n" + COMMON

READ = {
    "llamafactory all": ("llamafactory", FACTORY + "finetuning_type: lora\nlora_rank: 16\nlora_target: all\n",
                         (16, 32.0, TARGETS)),
    "llamafactory by default": ("llamafactory", FACTORY, (8, 16.0, TARGETS)),
    "axolotl": ("axolotl", AXOLOTL + "adapter: lora\nlora_r: 32\nlora_alpha: 16\n"
                "lora_target_modules: [v_proj, q_proj, down_proj]\n", (32, 16.0, ("query", "value", "down"))),
    "axolotl linear": ("axolotl", AXOLOTL + "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true\n",
                       (4, 8.0, TARGETS)),
    "trl": ("trl", TRL + "use_peft: true\nlora_r: 4\n", (4, 32.0, ("query", "value"))),
}  # fmt: skip


def read(system: str, text: str, **fields: Any) -> JobSpec:
    asked = Asked(cluster=AskedCluster(8, "h100-sxm"), **fields)
    return job_of_texts(SOURCES[system], {"job.yaml": text, "config.json": CONFIG}, asked, "a test").job


# Bases in NF4 as three programs say them: its settings, and if scales are quantised.
IN_NF4 = {
    "llamafactory": ("llamafactory", FACTORY + "quantization_bit: 4\nquantization_method: bnb\n", True),
    "llamafactory plain": ("llamafactory", FACTORY + "quantization_bit: 4\ndouble_quantization: false\n", False),
    "axolotl": (
        "axolotl",
        AXOLOTL + "adapter: qlora\nload_in_4bit: true\nlora_r: 32\nlora_target_linear: true\n",
        True,
    ),
    "trl": ("trl", TRL + "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\n", False),
    "trl nested": ("trl", TRL + "use_peft: true\nload_in_4bit: true\nuse_bnb_nested_quant: true\n", True),
}


@pytest.mark.parametrize("name", IN_NF4)
def test_bases_in_nf4_are_read(name: str) -> None:
    system, text, is_double = IN_NF4[name]
    adapter = read(system, text).model.adapter
    assert (adapter.base, adapter.double_quantization) == ("nf4", is_double)


@pytest.mark.parametrize("name", READ)
def test_adapters_are_read_and_priced_as_those_of_peft(name: str) -> None:
    system, text, (rank, alpha, targets) = READ[name]
    job = read(system, text)
    adapter = job.model.adapter
    assert (adapter.rank, adapter.alpha, adapter.targets) == (rank, alpha, targets)
    assert software_of(job.cluster.software).adapters == "peft" and job.precision.master_number == "float32"


@pytest.mark.parametrize(
    ("system", "text", "words"),
    [
        ("axolotl", AXOLOTL + "adapter: qlora\nlora_r: 4\n", "adapter = qlora"),
        ("axolotl", AXOLOTL + "adapter: lora\nlora_r: 4\nload_in_8bit: true\n", "load_in_8bit = True"),
        ("axolotl", AXOLOTL + "adapter: lora\nload_in_4bit: true\nlora_r: 4\n", "load_in_4bit = True"),
        ("axolotl", AXOLOTL + "adapter: lora\nlora_r: 4\nlora_target_modules: [W_pack]\n", "names W_pack"),
        ("llamafactory", FACTORY + "finetuning_type: lora\nquantization_bit: 8\n", "quantization_bit = 8"),
        ("llamafactory", FACTORY + "quantization_bit: 4\nquantization_type: fp4\n", "quantization_type = fp4"),
        ("llamafactory", FACTORY + "finetuning_type: lora\nuse_dora: true\n", "use_dora = True"),
        ("trl", TRL + "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: fp4\n", "bnb_4bit_quant_type = fp4"),
        ("trl", TRL + "load_in_4bit: true\n", "load_in_4bit = True"),
        ("trl", TRL + "use_peft: true\nlora_modules_to_save: [lm_head]\n", "lora_modules_to_save"),
    ],
)
def test_other_adapters_and_bases_in_other_types_are_refused_by_name(system: str, text: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(system, text)
    assert any(words in fault for fault in caught.value.faults)


def test_a_file_that_says_adapters_in_words_of_two_programs_is_read_by_those_of_its_own() -> None:
    text = AXOLOTL + "adapter: lora\nuse_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\nlora_r: 8\n"
    with pytest.raises(PlanError) as caught:
        read("axolotl", text)
    (fault,) = caught.value.faults
    assert fault.startswith("load_in_4bit = True beside adapter = lora: releases differ in the type of 4 bits")
    adapter = read("axolotl", text, overrides=("model.adapter.base=nf4",)).model.adapter
    assert (adapter.base, adapter.rank, adapter.alpha) == ("nf4", 8, 16.0)
    none = "model.adapter.base=compute", "model.adapter.double_quantization=false"
    assert read("axolotl", text, overrides=none).model.adapter.base == "compute"


def test_no_system_is_given_a_job_with_adapters() -> None:
    job = make_job({"model": {"adapter": {"rank": 4}}})
    for system in SYSTEMS.values():
        with pytest.raises(Lacking, match="adapters are not written for"):
            exported(system, job)
    other = make_job({"model": {"adapter": {"rank": 4, "alpha": 8.0}}})
    assert [name for name, *_ in differences(job, other)] == ["model.adapter.alpha"]
    in_nf4 = make_job({"model": {"adapter": {"rank": 4, "base": "nf4"}}})
    assert [name for name, *_ in differences(job, in_nf4)] == ["model.adapter.base"]
