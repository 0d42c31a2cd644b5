"""Habits of public files: fine-tuning in NeMo, programs that train nothing beside one that does, words of forks for the
model, files in the folders that commands name, and losses that plugins bring."""

import json
from pathlib import Path

import pytest

from interchange.test_habits_of_configurations import deepspeed
from interchange.test_habits_of_configurations import faults as faults_of
from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, megatron, script
from interchange.test_trainer_commands import AXOLOTL, MODEL, ZERO, job_read
from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import fields_of
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked, Imported, split_sets
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES

NEMO = """trainer: {devices: 8, num_nodes: 1, precision: bf16, max_steps: 60, gradient_clip_val: 1.0}
model:
  restore_from_path: /models/llama.nemo
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 2
  activations_checkpoint_granularity: selective
  activations_checkpoint_num_layers: "null"
  data: {train_ds: {max_seq_length: 2048, global_batch_size: "${peft.model.global_batch_size}"}}
  optim: {name: fused_adam, lr: 1e-4}
"""
LORA = """  peft:
    peft_scheme: lora
    lora_tuning: {adapter_dim: 16, target_modules: [attention_qkv, mlp_fc2], layer_selection: null, variant: nemo}
    ia3_tuning: {layer_selection: null}
"""


def nemo(peft: str = "", *sets: str) -> Imported:
    return job_read({"tune.yaml": NEMO + peft}, "model.name=llama2-7b", *sets)[1]


def test_a_model_that_a_nemo_file_has_is_asked_for_and_taken_by_its_name() -> None:
    (fault,) = faults({"tune.yaml": NEMO})
    assert "model.restore_from_path = /models/llama.nemo has the model" in fault
    assert "--set model.name=NAME" in fault
    job = nemo().job
    assert (job.model.layers, job.model.sequence, job.plan.dp, job.plan.tp) == (32, 2048, 4, 2)
    assert (job.batch.global_batch_size, job.plan.recompute, job.model.adapter.rank) == (128, "selective", 0)


def test_lora_of_nemo_has_its_rank_and_its_maps() -> None:
    adapter = nemo(LORA).job.model.adapter
    assert (adapter.rank, list(adapter.targets)) == (16, ["query", "key", "value", "down"])
    untold = nemo(LORA.replace("target_modules: [attention_qkv, mlp_fc2]", "weight_tying: false"))
    assert list(untold.job.model.adapter.targets) == ["query", "key", "value"]
    assert nemo("  peft: {peft_scheme: null, lora_tuning: {adapter_dim: 16}}\n").job.model.adapter.rank == 0


@pytest.mark.parametrize(
    ("peft", "expected"),
    [
        ("  peft: {peft_scheme: lora}\n", "model.peft.peft_scheme = lora: nothing says the rank"),
        ("  peft: {peft_scheme: ptuning}\n", "model.peft.peft_scheme = ptuning: adapters, frozen"),
        (LORA.replace("layer_selection: null, v", "layer_selection: [1, 2], v"), "layer_selection = 1 2"),
        (LORA.replace("mlp_fc2", "mlp_fc9"), "mlp_fc9"),
        (LORA.replace("variant: nemo", "weight_tying: true"), "lora_tuning.weight_tying = True"),
    ],
)
def test_adapters_of_nemo_that_are_not_said_or_not_here_are_faults(peft: str, expected: str) -> None:
    with pytest.raises(PlanError) as caught:
        nemo(peft)
    assert expected in " ".join(caught.value.faults)


def test_a_program_with_a_yaml_of_its_own_is_named_and_not_one_of_its_words() -> None:
    line = "python /opt/NeMo/examples/megatron_gpt_finetuning.py trainer.devices=$D model.data.files=a.yaml"
    (fault,) = faults(script(line))
    assert "megatron_gpt_finetuning.py begins from a YAML of its own" in fault


@pytest.mark.parametrize(
    "program", ["tools/hf2megads_weight_converter.py", "single_model_inf_test.py", "a_convertor.py"]
)
def test_programs_that_convert_or_infer_train_nothing(program: str) -> None:
    (fault,) = faults(script(MEGATRON.replace("pretrain_gpt.py", program)))
    assert "trains nothing by its name" in fault


def test_a_command_that_describes_the_model_afterwards_is_not_the_one_that_trains() -> None:
    lines = (f"deepspeed --num_gpus 2 sft.py {OPTIONS} --deepspeed ds.json", f"python generate_model_card.py {OPTIONS}")
    system, answer = job_read(script(*lines, ds_json=ZERO["ds.json"]) | MODEL)
    assert (system, answer.job.plan.dp) == ("deepspeed", 2)


def test_words_of_habana_for_norms_and_mlps_are_read_and_told() -> None:
    flags = "--no-bias --layernorm-type rmsnorm --activation-func-type swiglu --ffn-hidden-size 160"
    answer = megatron(flags=flags)
    model = answer.job.model
    assert (model.norm, model.activation, model.gated_mlp) == ("rmsnorm", "silu", True)
    assert (model.bias, model.tied_embeddings, model.ffn) == (False, False, 160)
    assert any("embedding and head are two matrices" in note for note in answer.assumed)
    plain = megatron(flags="--layernorm-type layernorm --activation-func-type gelu").job.model
    assert (plain.norm, plain.gated_mlp, plain.tied_embeddings) == ("layernorm", False, True)


@pytest.mark.parametrize(
    "flags", ["--layernorm-type own", "--activation-func-type own", "--norm-type x", "--mlp_type x"]
)
def test_unknown_kinds_of_norms_and_mlps_are_faults(flags: str) -> None:
    (fault,) = faults(script(MEGATRON + flags))
    assert "could change the model" in fault


@pytest.mark.parametrize(("size", "devices"), [("1", 1), ("8", 0)])
def test_a_world_of_one_rank_is_one_device(size: str, devices: int) -> None:
    command = MEGATRON.replace("torchrun --nproc_per_node 8", "python")
    if devices:
        assert megatron_of("RANK=0", f"WORLD_SIZE={size}", command).job.plan.world == devices
    else:
        (fault,) = faults(script("RANK=0", f"WORLD_SIZE={size}", command))
        assert "nothing says how many GPUs there are" in fault


def megatron_of(*lines: str) -> Imported:
    return job_read(script(*lines))[1]


def test_a_loop_over_arguments_in_quoted_arithmetic_does_nothing_without_them() -> None:
    loop = 'while (( "$#" )); do case "$1" in --size) SIZE="$2"; shift 2 ;; *) exit 1 ;; esac; done'
    assert megatron(loop, "SIZE=${SIZE:-32}", flags="--global-batch-size $SIZE").job.batch.global_batch_size == 32
    assert (
        megatron('N="3"', 'SIZE=$(( "$N" * 16 ))', flags="--global-batch-size $SIZE").job.batch.global_batch_size == 48
    )


@pytest.mark.parametrize(
    ("algorithm", "degree", "kind"), [("hybrid_cp_algo", 1, "ring"), ("hybrid_cp_algo", 4, "ulysses")]
)
def test_a_mixed_method_of_mindspeed_that_is_one_method_is_read(algorithm: str, degree: int, kind: str) -> None:
    flags = f"--context-parallel-size 4 --context-parallel-algo {algorithm} --ulysses-degree-in-cp {degree}"
    assert megatron(flags=flags).job.plan.cp_method == kind
    (fault,) = faults(script(MEGATRON + flags.replace(f"-cp {degree}", "-cp 2")))
    assert "--context-parallel-algo hybrid_cp_algo" in fault and "--ulysses-degree-in-cp 2" in fault


def test_plugins_of_axolotl_with_another_loss_are_refused() -> None:
    for plugin, is_refused in (
        ("liger.LigerPlugin", False),
        ("diffusion.DiffusionPlugin", True),
        ("kd.KDPlugin", True),
    ):
        text = f"{AXOLOTL['a.yaml']}plugins: [axolotl.integrations.{plugin}]\n"
        if is_refused:
            assert "training by preferences, rewards or noise" in faults_of("axolotl", text)[0]
        else:
            assert job_read({"a.yaml": text} | MODEL, devices=8)[1].job.plan.dp == 8


def test_kernels_of_experts_change_no_plan() -> None:
    text = AXOLOTL["a.yaml"] + "moe_kernels: true\n"
    assert job_read({"a.yaml": text} | MODEL, devices=8)[1].job.plan.dp == 8


@pytest.mark.parametrize(
    "name", ["me/Llama-2-7b-AQLM-2Bit-1x16-hf", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "me/x-bnb-4bit"]
)
def test_weights_that_are_quantised_by_name_are_told_to_be_counted_in_full(name: str) -> None:
    text = AXOLOTL["a.yaml"].replace("me/mine", name)
    answer = job_read({"a.yaml": text}, "model.name=llama2-7b", devices=8)[1]
    assert any("has quantised weights by its name" in line for line in answer.lost)
    usual = job_read(AXOLOTL, "model.name=llama2-7b", devices=8)[1]
    assert not any("quantised weights by its name" in line for line in usual.lost)


def test_where_deepspeed_offloads_is_a_word_it_has() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert deepspeed(train_micro_batch_size_per_gpu=1, zero_optimization=zero).job.plan.offload_optimizer == 1.0
    zero = {"stage": 2, "offload_optimizer": {"device": "disk"}}
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    assert "offload_optimizer.device = disk can't be said here" in faults_of("deepspeed", text, name="ds.json")[0]


@pytest.mark.parametrize("folder", ["-d configs ", "--conf_dir configs ", "configs/"])
def test_configurations_in_the_folder_that_a_command_names_are_read(tmp_path: Path, folder: str) -> None:
    (tmp_path / "configs").mkdir()
    model = (
        "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\npos_emb: rotary\nvocab_file: gpt2\n"
    )
    (tmp_path / "configs" / "small.yml").write_text(model + "train_micro_batch_size_per_gpu: 2\n", encoding="utf-8")
    (tmp_path / "configs" / "site.yml").write_text("data_path: letters\n", encoding="utf-8")
    words = f"{folder}small.yml {'configs/' if folder == 'configs/' else ''}site.yml"
    run = tmp_path / "run.sh"
    run.write_text(f"CUDA_VISIBLE_DEVICES=0 python ./deepy.py train.py {words}\n", encoding="utf-8")
    answer = read_job_of(SOURCES["gpt-neox"], (str(run),), Asked(*split_sets(("model.vocab=128",))))
    assert (answer.job.model.layers, answer.job.plan.microbatch_size) == (4, 2)
    assert sum("is read, which the files name" in note for note in answer.assumed) == 2
    (tmp_path / "configs" / "site.yml").unlink()
    with pytest.raises(PlanError) as caught:
        read_job_of(SOURCES["gpt-neox"], (str(run),), Asked(*split_sets(("model.vocab=128",))))
    assert "name it too" in caught.value.faults[0]


def test_a_configuration_of_a_model_that_an_option_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.json").write_text(MODEL["config.json"], encoding="utf-8")
    run = tmp_path / "run.sh"
    words = (
        "--per_device_train_batch_size 2 --learning_rate 1e-4 --output_dir x --config_name ${HERE}/models/small.json"
    )
    run.write_text(f"accelerate launch --num_processes 2 run_clm.py {words}\n", encoding="utf-8")
    model = read_job_of(SOURCES["accelerate"], (str(run),), Asked({}, {})).job.model
    assert model.layers == json.loads(MODEL["config.json"])["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("m.yml", "base_config: base.yml\nper_device_batch_size: 4\nmax_target_length: 8192\n", "MaxText"),
        ("run.sh", "#!/bin/bash\npython3 MaxText/$EXECUTABLE MaxText/base.yml steps=3\n", "MaxText"),
        ("run.sh", "#!/bin/bash\npython3 -m MaxText.train MaxText/configs/base.yml\n", "MaxText"),
    ],
)
def test_files_of_maxtext_are_refused_by_its_name(name: str, text: str, title: str) -> None:
    with pytest.raises(PlanError) as caught:
        system_name_of(name, text)
    assert title in caught.value.faults[0]


def test_a_file_of_an_own_program_is_none_of_axolotl() -> None:
    text = "base_model: null\nmicro_batch_size: 16\nnum_train_epochs: 1\npath_to_model_config: c.json\n"
    with pytest.raises(PlanError) as caught:
        system_name_of("specs.yaml", text)
    assert "no system is known to write such a file" in caught.value.faults[0]


def test_distillation_in_gpt_neox_is_refused_by_its_own_word() -> None:
    text = "pipe_parallel_size: 1\ndo_distillation: true\nstudent_model_args: {num_layers: 2}\nnum_layers: 2\n"
    assert faults({"a.yml": text}) == ["do_distillation: training by next tokens is counted here"]


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def test_keys_of_neuron_that_change_nothing_are_no_faults() -> None:
    plain, _ = fields_of(MIXTRAL)
    read, found_faults = fields_of(
        MIXTRAL | {"moe_frequency": 1, "use_flash_attention": True, "move_model_to_device": True}
    )
    assert (read, found_faults) == (plain, [])
    assert fields_of(MIXTRAL | {"moe_frequency": 2})[1]


def test_factors_of_channels_count_from_the_length_beside_their_section() -> None:
    llama = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
    }
    fields, faults_of_it = fields_of(llama | {"original_max_position_embeddings": 512})
    assert not faults_of_it
    assert fields["rotary_scaling"]["trained_sequence"] == 512
    assert fields["rotary_scaling"]["factor"] == 8.0
    linear = llama | {"rope_scaling": {"type": "linear", "factor": 2.0}, "original_max_position_embeddings": 512}
    assert fields_of(linear)[1]
