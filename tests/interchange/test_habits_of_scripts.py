"""Habits of public scripts that stand between their first line and the training command: loops, arguments, launchers,
batch systems; and options under older names."""

import json

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, megatron, script
from interchange.test_trainer_commands import FACTORY, FOLDER, MODEL, TRL, job_read
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked
from shardwright.interchange.named_files import library_texts
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES
from shardwright.interchange.systems import primus

ZERO = {"z.json": '{"zero_optimization": {"stage": 2}}'}


@pytest.mark.parametrize(
    ("resources", "devices"),
    [
        ("--gres=gpu:v100:1,nvme:100", 1),
        ("--gres=nvme:100,gpu:4(S:0-1)", 4),
        ("--gres=gpu", 1),
        ("--gpus-per-node=a100:2", 2),
    ],
)
def test_gpus_are_counted_among_other_resources(resources: str, devices: int) -> None:
    lines = (f"#SBATCH {resources}", f"python run_clm.py {OPTIONS}")
    assert job_read(script(*lines) | MODEL)[1].job.plan.world == devices


@pytest.mark.parametrize(
    "loop",
    [
        "for rate in $(seq 1.5 0.1 3.0); do",
        'for file in "$FOLDER"/*.json; do',
        "for index in ${!list[@]}; do",
    ],
)
def test_a_loop_over_what_is_unknown_is_followed_once(loop: str) -> None:
    lines = (loop, MEGATRON + "--global-batch-size 32", "done")
    answer = job_read(script(*lines))[1]
    assert answer.job.batch.global_batch_size == 32
    assert any("loop is not followed" in note for note in answer.assumed)
    (fault,) = faults(script("for size in $SIZES; do", MEGATRON + "--global-batch-size $size", "done"))
    assert "--global-batch-size by size" in fault


@pytest.mark.parametrize("words", ["$*", '"$@"', "$@"])
def test_a_loop_over_the_arguments_that_are_given_is_followed(words: str) -> None:
    loop = f"for word in {words}; do if [[ $word == --size* ]]; then SIZE=${{word#*=}}; fi; done"
    asked = Asked(arguments=("--size=64", "--more=1"))
    texts = script("SIZE=16", loop, MEGATRON + "--global-batch-size $SIZE")
    assert job_of_texts(SOURCES["megatron"], texts, asked, "run.sh").job.batch.global_batch_size == 64


def test_older_brackets_of_arithmetic_are_followed() -> None:
    assert megatron("N=2", flags="--global-batch-size $[${N}*$[8]]").job.batch.global_batch_size == 16


@pytest.mark.parametrize(
    "line",
    [
        "deepspeed --num_gpus 4 --module training.trainer",
        "torchrun --nproc_per_node 4 -m training.trainer",
        "accelerate launch --num_processes 4 --module training.trainer",
    ],
)
def test_a_module_is_a_program(line: str) -> None:
    plan = job_read(script(f"{line} {OPTIONS} --deepspeed z.json", z_json=ZERO["z.json"]) | MODEL)[1].job.plan
    assert (plan.world, plan.zero, plan.microbatch_size) == (4, 2, 2)


def test_a_launcher_that_is_unknown_is_asked_for_with_its_program() -> None:
    lines = ("if [ $(scontrol show hostnames | wc -l) -gt 1 ]; then", "start='srun torchrun -m a.train'", "else",
             "start='torchrun -m a.train'", "fi", f"$start {OPTIONS} --fsdp full_shard")  # fmt: skip
    assert "--set start=VALUE" in "".join(faults(script(*lines) | MODEL))
    known = job_read(script(*lines) | MODEL, "start=torchrun --nproc_per_node 8 -m a.train")
    assert known[1].job.plan.zero == 3


def test_a_script_that_echo_writes_is_followed_and_its_yaml_is_named() -> None:
    lines = (
        "worker=$(cat <<- EOM",
        "  python wan.py --config-file conf/a.yaml model.tensor_model_parallel_size=1",
        "EOM",
        ")",
        'echo "$worker" > worker.sh',
        "torchrun --nproc_per_node 8 --no-python bash worker.sh",
    )
    with pytest.raises(PlanError, match=r"conf/a\.yaml"):
        job_of_texts(SOURCES["nemo"], script(*lines), Asked(cluster=AskedCluster(8)), "run.sh")


def test_a_command_in_quotes_behind_a_program_is_that_programs_argument() -> None:
    command = f"python benchmark.py --base-cmd ' run_clm.py {OPTIONS}' --variations '--optim adafactor'"
    with pytest.raises(PlanError, match="no command in it trains"):
        job_read(script(command) | MODEL)


@pytest.mark.parametrize(
    ("option", "is_refused"),
    [
        ("--do_merge_lora", False),
        ("--model_size 7B", False),
        ("--source_model_max_length 2048", False),
        ("--merge_layers 2", True),
    ],
)
def test_options_of_programs_that_many_have_are_known(option: str, is_refused: bool) -> None:
    texts = script(f"deepspeed --num_gpus 2 train.py {OPTIONS} {option} --deepspeed z.json", z_json=ZERO["z.json"])
    if is_refused:
        assert option.split()[0] in faults(texts | MODEL)[0]
    else:
        assert job_read(texts | MODEL)[1].job.plan.zero == 2


@pytest.mark.parametrize("switch", ["--lora True", "--enable_lora", "--use_lora True"])
def test_switches_of_adapters_are_read_with_their_rank(switch: str) -> None:
    options = f"{OPTIONS} {switch} --lora_r 32 --lora_target_modules q_proj v_proj"
    adapter = job_read(script(f"torchrun --nproc_per_node 2 train.py {options}") | MODEL)[1].job.model.adapter
    assert adapter is not None and (adapter.rank, adapter.targets) == (32, ("query", "value"))


def test_settings_of_schedules_that_release_after_release_has_are_known() -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"last_batch_iteration": -1, "total_num_steps": 10}}
    text = json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler})
    line = f"deepspeed --num_gpus 2 train.py {OPTIONS} --deepspeed z.json"
    assert job_read(script(line, z_json=text) | MODEL)[1].job.plan.zero == 2


@pytest.mark.parametrize(
    "flags",
    [
        "--stage sft --is-instruction-dataset --neat-pack",
        "--use-fused-ring-attention-update --use-fused-swiglu",
        "--cp-attention-mask-type general --embedding-lr-multiplier 2.0",
    ],
)
def test_flags_of_mindspeed_that_change_no_plan_are_known(flags: str) -> None:
    assert megatron(flags=flags).job.plan.dp == 8


def test_the_width_of_mindspeeds_experts_has_an_older_name() -> None:
    flags = "--num-experts 4 --moe-router-topk 1 --n-shared-experts 1 --moe-intermediate-size 48 --swiglu"
    experts = megatron(flags=flags).job.model.moe
    assert experts is not None and (experts.ffn, experts.shared_ffn) == (48, 48)


@pytest.mark.parametrize("flag", ["--cla-share-factor 2", "--share-kvstates", "--outer-optimizer nesterov"])
def test_flags_that_change_what_is_kept_or_sent_are_faults(flag: str) -> None:
    assert flag.split()[0] in faults(script(MEGATRON + flag))[0]


def test_mixture_of_depths_is_a_fault_and_weights_in_bf16_are_told() -> None:
    text = FACTORY["l.yaml"].replace("bf16: true\n", "pure_bf16: true\n")
    line = {"run.sh": "#!/bin/bash\nNPROC_PER_NODE=2 llamafactory-cli train l.yaml\n"}
    answer = job_read(line | {"l.yaml": text} | MODEL)[1]
    assert answer.job.precision.compute == "bf16" and any("torch_dtype" in note for note in answer.lost)
    (fault,) = faults(line | {"l.yaml": text + "mixture_of_depths: convert\n"} | MODEL)
    assert "mixture_of_depths" in fault


@pytest.mark.parametrize("key", ["extends", "bases", "includes"])
def test_files_of_primus_begin_from_others_under_each_name(key: str) -> None:
    first = FOLDER / "primus/harbour-pretrain.yaml"
    text = first.read_text(encoding="utf-8")
    library = library_texts(primus.LIBRARY, first, {first.name: text})
    library = {name: text.replace("extends:", f"{key}:") for name, text in library.items()}
    job = job_of_texts(SOURCES["primus"], {first.name: text} | library, Asked(cluster=AskedCluster(32)), "x").job
    assert job.model.gated_mlp


SWIFT = "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft --model me/mine --dataset d --max_length 512 "


@pytest.mark.parametrize(
    ("options", "zero", "offload", "rank", "rate"),
    [
        ("--train_type full --deepspeed zero3", 3, (0.0, False), 0, 1e-5),
        ("--tuner_type full --deepspeed zero3_offload", 3, (1.0, True), 0, 1e-5),
        ("--sft_type full --deepspeed default-zero2", 2, (0.0, False), 0, 1e-5),
        ("--deepspeed zero2 --target_modules all-linear", 2, (0.0, False), 8, 1e-4),
        ("--train_type lora --lora_rank 16 --learning_rate 3e-4", 0, (0.0, False), 16, 3e-4),
    ],
)
def test_swift_sft_trains_with_its_own_defaults(
    options: str, zero: int, offload: tuple[float, bool], rank: int, rate: float
) -> None:
    texts = script(f"{SWIFT} --gradient_accumulation_steps 4 {options}") | MODEL
    system, answer = job_read(texts)
    job = answer.job
    assert system == "ms-swift"
    assert (job.plan.world, job.plan.zero, job.batch.global_batch_size, job.plan.recompute) == (2, zero, 8, "full")
    assert (job.plan.offload_optimizer, job.plan.offload_parameters) == offload
    assert (job.model.adapter.rank if job.model.adapter else 0, job.optimizer.learning_rate) == (rank, rate)


def test_swift_sft_accumulates_to_16_sequences_on_the_devices_that_it_has() -> None:
    without_devices = SWIFT.removeprefix("CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 ") + "--train_type full"
    assert "--gradient_accumulation_steps" in faults(script(without_devices) | MODEL)[0]
    assert job_read(script(SWIFT + "--train_type full") | MODEL)[1].job.batch.global_batch_size == 16
    texts = script(SWIFT + "--train_type full --per_device_train_batch_size 16") | MODEL
    assert job_read(texts)[1].job.batch.global_batch_size == 32


def test_options_of_trl_stay_known_beside_those_words() -> None:
    line = {"run.sh": "#!/bin/bash\ntrl sft --config t.yaml --num_processes 2\n"}
    text = TRL["t.yaml"] + "dataset_mixture: {datasets: []}\n"
    assert job_read(line | {"t.yaml": text} | MODEL)[1].job.plan.world == 2


def test_a_configuration_that_stands_behind_the_program_is_asked_for() -> None:
    line = "accelerate launch --config_file z.yaml --num_processes 2 sft.py t.yaml --learning_rate 1e-4"
    shards = {"z.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n"}
    assert "t.yaml is a file" in faults(script(line) | shards | MODEL)[0]
    assert job_read(script(line) | shards | TRL | MODEL)[1].job.model.sequence == 4096


def test_a_program_behind_the_launchers_options_may_be_a_variable() -> None:
    line = MEGATRON.replace("pretrain_gpt.py", "--master_port 6000 $PROGRAM").replace("PROGRAM --", "PROGRAM \\\n --")
    assert job_read(script(line))[1].job.plan.dp == 8


@pytest.mark.parametrize("test", ['[ -d "$OUT" ]', "[[ -f $OUT/done ]]"])
def test_results_that_a_loop_passes_are_not_there(test: str) -> None:
    lines = ("for SIZE in 16 32; do", "OUT=out/$SIZE", f"if {test}; then", "continue", "fi",
             MEGATRON + "--global-batch-size $SIZE", "done")  # fmt: skip
    assert job_read(script(*lines))[1].job.batch.global_batch_size == 32


NEOX = {
    "n.yml": '{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, '
    '"max_position_embeddings": 32, "train_micro_batch_size_per_gpu": 2, "pos_emb": "rotary", "mlp_type": "regular", '
    '"te_mha": true, "te_fp8_amax_history_len": 1, "moe_num_experts": EXPERTS, "moe_top_k": 1, '
    '"moe_router_type": "topk", "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}'
}


def test_what_gpt_neox_says_of_experts_counts_where_there_are_some() -> None:
    dense = {"n.yml": NEOX["n.yml"].replace("EXPERTS", "1")}
    assert job_read(dense, "model.vocab=128", devices=2)[1].job.plan.dp == 2
    some = {"n.yml": NEOX["n.yml"].replace("EXPERTS", "8")}
    with pytest.raises(PlanError, match="experts of GPT-NeoX are not read"):
        job_read(some, "model.vocab=128", devices=2)


@pytest.mark.parametrize(("section", "stage"), [("true", 1), ("false", 0), ('{"stage": 2}', 2)])
def test_zero_may_be_a_word_in_place_of_a_section(section: str, stage: int) -> None:
    text = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": SECTION}'.replace("SECTION", section)
    assert job_read({"z.json": text} | MODEL, devices=2)[1].job.plan.zero == stage


def test_a_script_without_a_sign_is_known_by_those_that_it_sources() -> None:
    first, second = 'source args.sh\neval "$header" "$args"\n', f'args="{OPTIONS}"\n'
    assert system_name_of("run.sh", f"#!/bin/bash\n{first}", second) == "accelerate"
    assert system_name_of("run.sh", f"#!/bin/bash\n{first}") == "megatron"


@pytest.mark.parametrize("flags", ["--task RACE --model-type BERT", "--model-provider llava_vlm", "--enable-gpt-oss"])
def test_flags_that_make_another_program_or_model_are_faults(flags: str) -> None:
    assert flags.split()[0] in "".join(faults(script(MEGATRON + flags)))


@pytest.mark.parametrize(
    "start", [SWIFT + "--gradient_accumulation_steps 4", "NPROC_PER_NODE=2 megatron sft --model me/mine"]
)
@pytest.mark.parametrize(("task", "is_refused"), [("reranker", True), ("seq_cls", True), ("causal_lm", False)])
def test_tasks_of_ms_swift_that_learn_no_next_tokens_are_refused(start: str, task: str, is_refused: bool) -> None:
    texts = script(f"{start} --task_type {task} --train_type full") | MODEL
    if is_refused:
        assert f"--task_type {task}" in "".join(faults(texts))
    else:
        assert job_read(texts)[1].job.plan.world == 2


def test_gradient_difference_of_gpt_neox_is_refused() -> None:
    text = NEOX["n.yml"].replace("EXPERTS", "1").replace('"mlp_type"', '"gd_mode": true, "mlp_type"')
    with pytest.raises(PlanError, match="gd_mode"):
        job_read({"n.yml": text}, "model.vocab=128", devices=2)


@pytest.mark.parametrize("value", ["$(python3 -c 'print(16)')", "`python3 size.py`"])
def test_the_variable_with_a_default_that_a_command_prints_is_asked_for(value: str) -> None:
    (fault,) = faults(script(MEGATRON + f"--global-batch-size ${{SIZE:-{value}}}"))
    assert fault.endswith("say it: --set SIZE=VALUE")


def test_optimizers_that_ms_swift_adds_are_told() -> None:
    texts = script(f"{SWIFT} --gradient_accumulation_steps 4 --train_type full --optimizer muonclip") | MODEL
    assert any("muonclip" in note for note in job_read(texts)[1].lost)


@pytest.mark.parametrize("program", ["gan_deepspeed_train.py", "cifar10_deepspeed.py"])
def test_programs_of_images_are_refused_by_their_names(program: str) -> None:
    texts = script(f"deepspeed --num_gpus 2 {program} {OPTIONS} --deepspeed z.json", z_json=ZERO["z.json"])
    assert "trains images" in "".join(faults(texts | MODEL))
