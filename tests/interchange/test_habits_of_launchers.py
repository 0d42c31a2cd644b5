"""Options of launchers and of programs that say what a configuration would, and defaults of programs that name none."""

from typing import Any

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, megatron, script
from interchange.test_trainer_commands import AXOLOTL, MODEL, TRL, job_read
from shardwright.config.base import PlanError
from shardwright.interchange.recognised import system_name_of

LAUNCH = "accelerate launch --num_processes 8 --mixed_precision bf16"


@pytest.mark.parametrize(
    ("flags", "zero", "offloaded"),
    [
        ("--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --offload_param_device cpu", 3, 1.0),
        ("--use_deepspeed --zero_stage=1", 1, 0.0),
        ("--use_deepspeed --offload_optimizer_device none", 2, 0.0),
        ("--use_fsdp --fsdp_sharding_strategy=2", 2, 0.0),
        ("--use_fsdp --fsdp_sharding_strategy FULL_SHARD --fsdp_offload_params true", 3, 1.0),
    ],
)
def test_accelerates_launcher_says_what_its_configuration_would(flags: str, zero: int, offloaded: float) -> None:
    plan = job_read(script(f"{LAUNCH} {flags} train.py {OPTIONS}") | MODEL)[1].job.plan
    assert (plan.zero, plan.offload_optimizer) == (zero, offloaded)


def test_degrees_of_accelerates_launcher_are_read() -> None:
    flags = "--use_fsdp --fsdp_version 2 --use_parallelism_config true --parallelism_config_tp_size 2"
    plan = job_read(script(f"{LAUNCH} {flags} train.py {OPTIONS}") | MODEL)[1].job.plan
    assert (plan.tp, plan.dp, plan.zero) == (2, 4, 3)


def test_a_file_that_has_the_options_of_a_program_is_asked_for_and_read() -> None:
    lines = f"{LAUNCH} --use_fsdp train.py --train_config conf/own.json"
    assert any(
        "own.json has the options of the program, and is not read" in fault for fault in faults(script(lines) | MODEL)
    )
    own = {"own.json": '{"per_device_train_batch_size": 3, "learning_rate": 1e-4, "seq_length": 512}'}
    job = job_read(script(lines) | own | MODEL)[1].job
    assert (job.plan.microbatch_size, job.model.sequence) == (3, 512)


@pytest.mark.parametrize(
    ("flags", "base", "rank"),
    [
        ("", "nf4", 64),
        ("--lora_r 16 --bits 4 --quant_type nf4 --double_quant --lora_modules all", "nf4", 16),
        ("--bits 16", "compute", 64),
        ("--full_finetune True --bits 16", "compute", 0),
    ],
)
def test_the_program_of_the_qlora_paper_has_defaults_of_its_own(flags: str, base: str, rank: int) -> None:
    line = f"torchrun --nproc_per_node 2 qlora.py --model_name_or_path me/mine --learning_rate 1e-4 {flags}"
    adapter = job_read(script(line) | MODEL)[1].job.model.adapter
    assert (adapter.base, adapter.rank) == (base, rank)


def test_other_numbers_of_bits_and_adapters_without_a_rank_are_faults() -> None:
    line = f"torchrun --nproc_per_node 2 qlora.py {OPTIONS} --bits 8"
    assert any("bits = 8" in fault for fault in faults(script(line) | MODEL))
    line = f"torchrun --nproc_per_node 2 finetune_lora.py {OPTIONS}"
    assert any("nothing says the rank" in fault for fault in faults(script(line) | MODEL))


@pytest.mark.parametrize(
    ("files", "options", "numbers"),
    [
        (AXOLOTL, "", "bf16"),
        (AXOLOTL, "fp16: true\n", "fp16"),
        (AXOLOTL, "bf16: false\n", "float32"),
        (TRL, "", "bf16"),
        (TRL, "fp16: true\n", "fp16"),
        (TRL, "bf16: false\n", "float32"),
    ],
)
def test_numbers_are_bf16_where_axolotl_and_trl_say_nothing(files: dict[str, str], options: str, numbers: str) -> None:
    ((name, text),) = files.items()
    plain = text.replace("bf16: auto\n", "").replace("bf16: true\n", "")
    assert job_read({name: plain + options} | MODEL, devices=8)[1].job.precision.compute == numbers


def test_epsilon_has_its_own_name_in_axolotls_file() -> None:
    ((name, text),) = AXOLOTL.items()
    assert job_read({name: text + "adam_epsilon: 1.0e-5\n"} | MODEL, devices=8)[1].job.optimizer.epsilon == 1e-5


def test_an_optimizer_that_is_not_here_blocks_no_script() -> None:
    read = megatron(flags="--optimizer ademamix --global-batch-size 16 --decrease-batch-size-if-needed")
    assert read.job.optimizer.name == "adamw"
    assert any("--optimizer ademamix: AdamW with two moments" in line for line in read.lost)


def test_groups_of_keys_that_megatron_does_not_read_are_told() -> None:
    read = megatron(flags="--num-query-groups 2")
    assert read.job.model.num_kv_heads == read.job.model.heads
    assert any("--group-query-attention alone" in line for line in read.lost)


YAML = """
language_model: {num_layers: 4, hidden_size: 512, num_attention_heads: 8, num_query_groups: 2, kv_channels: null,
  activation_func: ACTIVATION, add_bias_linear: false, normalization: RMSNorm, num_moe_experts: null}
model_parallel: {tensor_model_parallel_size: 2, sequence_parallel: true, bf16: true, cpu_offloading: false,
  cpu_offloading_activations: true, perform_initialization: true}
micro_batch_size: 2
global_batch_size: 32
seq_length: 1024
max_position_embeddings: 1024
swiglu: true
position_embedding_type: rope
untie_embeddings_and_output_weights: true
use_distributed_optimizer: true
lr: 1.0e-4
train_iters: 10
bert_binary_head: true
"""
YAML_SETS = ("model.vocab=512",)


@pytest.mark.parametrize(("activation", "shape"), [("swiglu", ("silu", True)), ("squaredrelu", ("relu2", False))])
def test_the_yaml_of_megatrons_arguments_stands_in_place_of_flags(activation: str, shape: tuple[str, bool]) -> None:
    text = YAML.replace("ACTIVATION", activation)
    command = "torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg conf/gpt.yaml --num-layers 99"
    for texts, devices in ((script(command) | {"gpt.yaml": text}, 0), ({"gpt.yaml": text}, 8)):
        name, first = next(iter(texts.items()))
        assert system_name_of(name, first) == "megatron"
        job = job_read(texts, *YAML_SETS, devices=devices)[1].job
        assert (job.plan.tp, job.plan.dp, job.plan.sequence_parallel, job.plan.zero) == (2, 4, True, 1)
        assert (job.model.layers, job.model.num_kv_heads, job.precision.compute) == (4, 2, "bf16")
        assert (job.model.activation, job.model.gated_mlp) == shape
    assert any("--yaml-cfg conf/gpt.yaml" in fault for fault in faults(script(command)))
    assert any("activation_func = x" in fault for fault in faults({"gpt.yaml": YAML.replace("ACTIVATION", "x")}))


def test_settings_of_adapters_that_nemo_does_not_use_change_nothing() -> None:
    text = (
        "trainer: {devices: 8, precision: bf16}\nmodel:\n  micro_batch_size: 2\n  global_batch_size: 256\n"
        "  encoder_seq_length: 4096\n  num_layers: 4\n  hidden_size: 512\n  num_attention_heads: 8\n"
        "  peft: {peft_scheme: SCHEME, lora_tuning: {adapter_dim: 32}}\n"
    )
    assert job_read({"sft.yaml": text.replace("SCHEME", "none")}, *YAML_SETS)[1].job.plan.dp == 8
    assert any("adapter_dim" in fault for fault in faults({"sft.yaml": text.replace("SCHEME", "ia3")}, *YAML_SETS))
    assert job_read({"sft.yaml": text.replace("SCHEME", "lora")}, *YAML_SETS)[1].job.model.adapter.rank == 32


FLAVORS: dict[tuple[str, str], dict[str, Any]] = {
    ("deepseek_v3", "16B"): {"layers": 27, "hidden": 2048, "vocab": 102400},
    ("deepseek_v3", "236B"): {"layers": 60, "hidden": 5120, "vocab": 102400},
    ("gpt_oss", "20b"): {"layers": 24, "hidden": 2880, "sinks": True},
    ("llama4", "17bx16e"): {"layers": 48, "kv_heads": 8, "ffn": 16384},
    ("llama4", "17bx128e"): {"layers": 48, "kv_heads": 8, "ffn": 16384},
}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_further_flavors_of_torchtitan_are_read(flavor: tuple[str, str]) -> None:
    text = f'[model]\nname = "{flavor[0]}"\nflavor = "{flavor[1]}"\n[training]\nseq_len = 64\n'
    model = job_read({"t.toml": text}, devices=8)[1].job.model
    assert {name: getattr(model, name) for name in FLAVORS[flavor]} == FLAVORS[flavor]
    if flavor[0] == "llama4":
        assert model.has_experts(1) and model.has_experts(0) == (flavor[1] == "17bx16e")


SWIFT = "NPROC_PER_NODE=8 megatron sft --model me/mine --micro_batch_size 2 --global_batch_size 16 --max_length 512 "


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ("", {"recompute": "selective", "zero": 1}),
        ("--recompute_granularity none", {"recompute": "none", "zero": 1}),
        ("--use_distributed_optimizer false", {"recompute": "selective", "zero": 0}),
    ],
)
def test_options_that_are_switched_off_hold_over_a_systems_defaults(options: str, plan: dict[str, Any]) -> None:
    job = job_read(script(SWIFT + options) | MODEL)[1].job
    assert {name: getattr(job.plan, name) for name in plan} == plan


def test_configurations_that_a_script_writes_count_over_files_of_their_name() -> None:
    """The file is of an earlier run, with another stage."""
    engine = '{"zero_optimization": {"stage": %s}, "train_micro_batch_size_per_gpu": 2, "train_batch_size": 16}'
    lines = ("STAGE=${1:-2}", "cat <<EOT > ds_config.json", engine % "$STAGE", "EOT")
    start = "deepspeed --num_gpus 8 bench.py --grad_checkpoint --deepspeed_config ds_config.json --max_length 512"
    answer = job_read(script(*lines, start) | {"ds_config.json": engine % 3} | MODEL)[1]
    assert (answer.job.plan.zero, answer.job.plan.recompute) == (2, "full")
    assert any("ds_config.json: what the script writes there counts" in note for note in answer.assumed)
    flags = MEGATRON + "--deepspeed --deepspeed_config ds_config.json"
    texts = script(*lines, flags.replace("torchrun --nproc_per_node 8", "deepspeed --num_gpus 8"))
    assert job_read(texts | {"ds_config.json": engine % 3})[1].job.plan.zero == 2


def test_devices_that_a_script_makes_visible_are_those_of_deepspeed() -> None:
    start = f"deepspeed train.py {OPTIONS} --deepspeed z.json"
    files = {"z.json": '{"zero_optimization": {"stage": 2}}'} | MODEL
    assert job_read(script("export CUDA_VISIBLE_DEVICES=0,1,2", start) | files)[1].job.plan.dp == 3
    (fault,) = faults(script("export CUDA_VISIBLE_DEVICES=$MINE", start) | files)
    assert "how many GPUs there are" in fault


def test_commands_of_tools_with_the_trainers_options_are_read_by_their_task() -> None:
    options = "--model_name me/mine --per_device_train_batch_size 4 --learning_rate 1e-5 --max_length 256"
    files = {"z.json": '{"zero_optimization": {"stage": 2}}'} | MODEL
    answer = job_read(script(f"aligner sft {options} --deepspeed z.json") | files, devices=8)[1]
    assert (answer.job.plan.dp, answer.job.batch.global_batch_size, answer.job.model.sequence) == (8, 32, 256)
    with pytest.raises(PlanError) as error:
        job_read(script(f"aligner dpo {options} --deepspeed z.json") | files, devices=8)
    assert any("by preferences" in fault for fault in error.value.faults)


def test_the_program_of_a_module_is_its_last_part() -> None:
    (fault,) = faults(script(MEGATRON.replace("pretrain_gpt.py", "-m tools.examples.qwen2.dpo_qwen")))
    assert "by preferences" in fault
    (fault,) = faults(script(MEGATRON + "--train-mode dpo"))
    assert "by preferences" in fault


def test_two_lengths_of_samples_are_told() -> None:
    start = f"torchrun --nproc_per_node 4 train.py {OPTIONS} --model_max_length 4096 --cutoff_len 16000"
    answer = job_read(script(start) | MODEL)[1]
    assert answer.job.model.sequence == 4096
    assert any("16000: 4096 tokens are taken" in line.replace("4,096", "4096") for line in answer.lost)


def test_a_warm_up_that_a_command_prints_blocks_nothing() -> None:
    answer = job_read(script("SHARE=$(head -1 share.txt)", MEGATRON + "--lr-warmup-fraction $SHARE"))[1]
    assert answer.job.optimizer.warmup_steps == 0
    assert any("there is no warm-up" in line for line in answer.lost)


@pytest.mark.parametrize("name", ["rl_model_name", "teacher_model"])
def test_further_models_of_a_program_are_faults(name: str) -> None:
    """One that a run by preferences is compared with is refused whatever is left out."""
    (fault,) = faults(script(f"torchrun --nproc_per_node 4 train.py {OPTIONS} --{name} me/other") | MODEL)
    assert ("training by preferences" if name == "ref_model_path" else f"--set {name}=ignore") in fault


def test_a_model_of_reference_is_of_preferences_and_not_to_be_ignored() -> None:
    (fault,) = faults(script(f"torchrun --nproc_per_node 4 train.py {OPTIONS} --ref_model_path me/other") | MODEL)
    assert fault.startswith("--ref_model_path = me/other: training by preferences") and "ignore" not in fault


def test_a_toml_that_a_script_names_is_read_with_the_scripts_flags() -> None:
    toml = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 2\nseq_len = 1024\n'
    lines = ("#SBATCH --nodes=2", "srun torchrun --nnodes 2 --nproc_per_node 8 train.py --job.config_file c/t.toml "
             "--training.seq_len 512 --training.shuffle_seed $RANDOM")  # fmt: skip
    system, answer = job_read(script(*lines) | {"t.toml": toml})
    assert system == "torchtitan-0.2"
    job = answer.job
    assert (job.plan.world, job.plan.microbatch_size, job.model.sequence) == (16, 2, 512)
    (fault,) = faults(script(*lines))
    assert "c/t.toml has the options of the program" in fault


def test_a_frozen_tower_of_images_is_not_counted_anyway() -> None:
    assert job_read(script(SWIFT + "--freeze_vit true") | MODEL)[1].job.plan.tp == 1
    (fault,) = faults(script(SWIFT + "--freeze_llm true") | MODEL)
    assert "freeze_llm" in fault


def test_a_length_under_another_name_holds_in_place_of_the_default_one() -> None:
    answer = job_read({"t.yaml": TRL["t.yaml"].replace("max_length", "max_seq_length")} | MODEL, devices=8)[1]
    assert answer.job.model.sequence == 4096
    assert not any("1024" in line.replace(",", "") for line in (*answer.assumed, *answer.lost))


def test_keys_of_deepspeed_that_accelerate_passes_over_block_nothing() -> None:
    """Its launcher hands on those that it has options for; the program's microbatch counts."""
    engine = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 3, %s}\n"
    start = f"accelerate launch --config_file z.yaml train.py {OPTIONS}"
    texts = script(start) | MODEL | {"z.yaml": engine % "train_batch_size: 64, data_parallel_size: 8"}
    job = job_read(texts)[1].job
    assert (job.plan.dp, job.plan.microbatch_size, job.batch.global_batch_size) == (4, 2, 8)
    (fault,) = faults(texts | {"z.yaml": engine % "micro_batch: 64"})
    assert "deepspeed_config.micro_batch" in fault
    dropped = job_read(texts | {"z.yaml": engine % "reduce_bucket_size: 2e8, tensor_parallel: {tp_size: 4}"})[1]
    assert any("deepspeed_config.tensor_parallel.tp_size = 4" in line for line in dropped.lost)
    assert dropped.job.plan.tp == 1


@pytest.mark.parametrize("kind", ["MULTI_GPU", "NO"])
def test_the_engine_of_a_program_counts_beside_a_plain_launcher(kind: str) -> None:
    start = f"accelerate launch --config_file z.yaml train.py {OPTIONS} --deepspeed d.json"
    files = {
        "z.yaml": f"distributed_type: '{kind}'\nnum_processes: 4\n",
        "d.json": '{"zero_optimization": {"stage": 2}}',
    }
    assert job_read(script(start) | MODEL | files)[1].job.plan.zero == 2


@pytest.mark.parametrize("target", ["train.sbatch", "$SCRATCH/run/train.sbatch"])
def test_a_script_that_a_script_writes_is_followed_where_it_is_started(target: str) -> None:
    lines = (f"cat > {target} <<- EOM", "#SBATCH --nodes=2", "torchrun --nproc_per_node 8 \\", f"  {MEGATRON}", "EOM")
    answer = job_read(script(*lines, f"sbatch {target}"))[1]
    assert answer.job.plan.dp == 16


def test_a_program_with_options_like_megatrons_is_not_taken_for_it() -> None:
    (fault,) = faults(script("torchrun --nproc_per_node 4 train.py --num_layers 2 --hidden_size 64 --num_heads 4"))
    assert "train.py is a program whose options are not known here" in fault


def test_remarks_and_options_that_halve_the_batch_are_told() -> None:
    model = {"config.json": MODEL["config.json"].replace("{", '{"_description": "a small one", ', 1)}
    answer = job_read(script(f"torchrun --nproc_per_node 4 train.py {OPTIONS} --auto_find_batch_size") | model)[1]
    assert any("_description" in line for line in answer.assumed)
    assert any("--auto_find_batch_size" in line for line in answer.lost)


def test_options_may_stand_in_a_json_behind_a_launched_program() -> None:
    options = '{"per_device_train_batch_size": 2, "learning_rate": 1e-4, "deepspeed": "d.json"}'
    texts = script("srun torchrun --nnodes=5 --nproc_per_node=8 train_tts.py own.json")
    texts |= {"own.json": options, "d.json": '{"zero_optimization": {"stage": 2}}'} | MODEL
    system, answer = job_read(texts)
    assert system == "accelerate"
    assert (answer.job.plan.dp, answer.job.plan.zero, answer.job.batch.global_batch_size) == (40, 2, 80)


def test_ranks_of_adapters_count_for_nothing_where_a_switch_is_off() -> None:
    options = {"lora_r": 64, "lora_target_modules": "all-linear", "bnb_4bit_quant_type": "nf4"}
    own = "".join(f"{name}: {value}\n" for name, value in options.items())
    texts = {"t.yaml": TRL["t.yaml"] + own + "use_peft: false\n"} | MODEL
    assert not job_read(texts, devices=8)[1].job.model.is_adapted
    (fault,) = faults(
        {"t.yaml": TRL["t.yaml"] + own} | MODEL | {"z.yaml": "num_processes: 8\ndistributed_type: MULTI_GPU"}
    )
    assert "lora_r = 64" in fault


def test_names_of_ms_swift_before_its_third_release_are_read() -> None:
    line = "NPROC_PER_NODE=3 swift sft --sft_type full --tuner_backend peft --batch_size 4 --model_id_or_path me/mine "
    plan = job_read(script(line + "--gradient_accumulation_steps 8 --deepspeed default-zero3") | MODEL)[1].job.plan
    assert (plan.dp, plan.zero, plan.microbatch_size) == (3, 3, 4)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.py", "hybrid_zero_optimizer = dict(overlap_sync_grad=True)", "InternEvo"),
        ("t.py", "optimizer = {'lr': 1e-4}", "no system is known"),
        ("t.yml", "base_emb_dim: 2048", "MaxText"),
        ("m.yaml", "parallel: {fsdp_plan: {cpu_offload: false}}\ndata: {dataset_param: {}}\n", "MindSpeed-MM"),
    ],
)
def test_files_of_systems_that_are_not_read_are_refused_by_their_keys(name: str, text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        system_name_of(name, text)
