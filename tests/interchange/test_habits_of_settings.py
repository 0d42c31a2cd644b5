"""Habits of settings: said twice, said at another place, said under a name of the first programs, or not said."""

import json

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, script
from interchange.test_trainer_commands import MODEL, job_read
from shardwright.config.base import PlanError

DEEPSPEED = "deepspeed --num_gpus 4 mine.py --deepspeed_config ds.json " + OPTIONS
FSDP = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\nnum_processes: 4\n"
ZERO = "distributed_type: DEEPSPEED\nnum_processes: 2\n"


def test_a_microbatch_that_a_file_and_a_command_say_otherwise_is_told() -> None:
    for size, told in ((3, True), (2, False)):
        config = json.dumps({"train_micro_batch_size_per_gpu": size, "zero_optimization": {"stage": 1}})
        result = job_read(script(DEEPSPEED, ds_json=config) | MODEL)[1]
        line = f"--per_device_train_batch_size = 2: train_micro_batch_size_per_gpu = {size} is taken"
        assert result.job.plan.microbatch_size == size
        assert any(line in note for note in result.lost) == told


def test_the_length_of_a_named_model_is_told_where_it_is_taken() -> None:
    told = "nothing says how long samples are; 4,096 tokens are taken"
    texts = {"f.yaml": FSDP}
    taken = job_read(texts, "model.name=llama2-7b")[1]
    assert taken.job.model.sequence == 4096 and any(told in note for note in taken.assumed)
    stated = job_read(texts, "model.name=llama2-7b", "model.sequence=512")[1]
    assert stated.job.model.sequence == 512 and not any("how long samples" in note for note in stated.assumed)
    named = OPTIONS.replace("me/mine", "meta-llama/Llama-2-7b-hf")
    assert any(told in note for note in job_read(script("torchrun --nproc_per_node 2 mine.py " + named))[1].assumed)


@pytest.mark.parametrize(
    ("program", "further", "tokens"),
    [("train_bash", "", 1024), ("train", "", 2048), ("train", "--cutoff_len 300", 300)],
)
def test_commands_of_llama_factory_have_its_length(program: str, further: str, tokens: int) -> None:
    line = f"torchrun --nproc_per_node 2 src/{program}.py --stage sft --do_train --finetuning_type full --template x "
    assert job_read(script(line + OPTIONS + further) | MODEL)[1].job.model.sequence == tokens


def test_a_file_of_deepspeed_that_stands_at_the_top_of_one_of_accelerate_counts() -> None:
    texts = {"a.yaml": ZERO + "deepspeed_config_file: /home/me/z3.json\n"} | MODEL
    assert any("z3.json is a file that is not read" in fault for fault in faults(texts))
    config = json.dumps({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    assert job_read(texts | {"z3.json": config})[1].job.plan.zero == 3


def test_processors_and_parameters_of_stage_2_are_told() -> None:
    section = "deepspeed_config: {zero_stage: 2, offload_param_device: cpu}\n"
    result = job_read({"a.yaml": f"{ZERO}{section}use_cpu: true\n"} | MODEL)[1]
    assert result.job.plan.zero == 2 and not result.job.plan.offload_parameters
    assert any("it computes on processors there" in note for note in result.lost)
    assert any("parameters are offloaded by stage 3 alone" in note for note in result.lost)
    third = job_read({"a.yaml": f"{ZERO}{section}use_cpu: false\n".replace("stage: 2", "stage: 3")} | MODEL)[1]
    assert third.job.plan.offload_parameters and not any("processors" in note for note in third.lost)


@pytest.mark.parametrize(
    "start", ["torchrun --nproc_per_node 2 adapt.py ", "accelerate launch --num_processes 2 a.py "]
)
def test_outputs_of_commands_say_that_preferences_are_learned(start: str) -> None:
    line = f"{start} adapt.py " + OPTIONS.replace("--output_dir x", "--output_dir out/llama-dpo/")
    told = "llama-dpo trains a model by preferences"
    assert any(told in note for note in job_read(script(line) | MODEL)[1].lost)
    stated = job_read(script(f"{line} --stage sft") | MODEL)[1]
    assert not any(told in note for note in stated.lost)


def test_degrees_and_accumulation_of_the_first_deepspeed_are_read() -> None:
    flags = MEGATRON.replace("--micro-batch-size 2", "--batch-size 2") + "--model-parallel-size 2 "
    job = job_read(script(flags + "--pipe-parallel-size 2 --gas 8"))[1].job
    assert (job.plan.tp, job.plan.pp, job.plan.dp, job.batch.global_batch_size) == (2, 2, 2, 32)
    job = job_read(script(flags + "--pipe-parallel-size 2 --gas 8 --global-batch-size 16"))[1].job
    assert job.batch.global_batch_size == 16


def test_flavors_of_torchtitan_that_are_names_of_the_hub_are_known() -> None:
    text = '[model]\nname = "deepseek_v2"\nflavor = "deepseek-ai/DeepSeek-V2-Lite"\n[training]\nlocal_batch_size = 2\n'
    shards = "seq_len = 1024\n[parallelism]\ndata_parallel_shard_degree = 2\n"
    model = job_read({"a.toml": text + shards})[1].job.model
    assert model.name == "deepseek-v2-lite" and model.moe.experts == 64


@pytest.mark.parametrize(
    "texts",
    [
        {"a.yaml": "base_model: me/mine\nsequence_len: 64\nmicro_batch_size: 1\ndeepspeed: deepspeed/mine3.json\n"},
        script(f"torchrun --nproc_per_node 2 mine.py --deepspeed deepspeed/mine3.json {OPTIONS}"),
        script(f"accelerate launch --config_file ../mine3.json --num_processes 2 mine.py {OPTIONS}"),
    ],
)
def test_a_stage_that_is_said_stands_for_a_file_that_nobody_has(texts: dict[str, str]) -> None:
    with pytest.raises(PlanError) as caught:
        job_read(texts | MODEL, devices=2)
    assert "--set plan.zero=N" in caught.value.faults[0]
    result = job_read(texts | MODEL, "plan.zero=3", devices=2)[1]
    assert result.job.plan.zero == 3
    assert any("mine3.json: it is not read, and what it says of numbers" in note for note in result.assumed)
    assert not any("(DDP)" in note for note in result.assumed)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--model_type qwen2-0_5b-instruct --model_id_or_path /data/mine", "qwen2-0.5b"),
        ("--model_type qwen-7b-chat", "qwen-7b"),
        ("--model_type qwen-7b-chat --model_id_or_path qwen/Qwen2-0.5B", "qwen2-0.5b"),
    ],
)
def test_models_that_older_ms_swift_names_by_their_types_are_known(words: str, name: str) -> None:
    line = f"NPROC_PER_NODE=2 swift sft {words} --sft_type full --batch_size 4 --gradient_accumulation_steps 1 "
    assert job_read(script(line + "--dataset d --max_length 64"))[1].job.model.name == name


WORLD = ("WORLD=$((ITS_NODES * ITS_GPUS))", "SIZE=$((WORLD * 2))")
ITS_RANKS = "torchrun --nnodes=$ITS_NODES --nproc_per_node=$ITS_GPUS "


def test_a_batch_of_the_number_of_devices_follows_from_devices() -> None:
    line = MEGATRON.replace("torchrun --nproc_per_node 8 ", ITS_RANKS) + "--global-batch-size $SIZE"
    (fault,) = faults(script(*WORLD, line))
    assert "--set ITS_NODES=VALUE --set ITS_GPUS=VALUE, or with --devices N" in fault
    result = job_read(script(*WORLD, line), devices=16)[1]
    assert (result.job.plan.dp, result.job.batch.global_batch_size) == (16, 32)
    assert "ITS_NODES=2, ITS_GPUS=8 by --devices" in result.assumed
    stated = job_read(script(*WORLD, line), "ITS_NODES=4", "ITS_GPUS=4")[1]
    assert stated.job.batch.global_batch_size == 32 and not any("by --devices" in note for note in stated.assumed)


def test_nodes_that_are_said_stay_beside_devices() -> None:
    line = MEGATRON.replace("torchrun --nproc_per_node 8 ", ITS_RANKS.replace("$ITS_NODES", "2"))
    batch = "--global-batch-size $((ITS_GPUS * 4))"
    assert job_read(script(line + batch), devices=8)[1].job.batch.global_batch_size == 16  # two nodes of 4 are 8
    with pytest.raises(PlanError) as caught:  # and no two are 9
        job_read(script(line + batch), devices=9)
    assert any("--global-batch-size by ITS_GPUS" in fault for fault in caught.value.faults)


LAUNCH = "accelerate launch --num_processes 4 "
TRAINS = "mine.py --per_device_train_batch_size 2 --max_length 512 --model_name_or_path me/mine "
MEGATRON_FULL = MEGATRON.replace(" --micro-batch-size", " --recompute-granularity full --micro-batch-size")


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        (LAUNCH + TRAINS + "--gradient_accumulation_steps $N", "--gradient_accumulation_steps by N"),
        (f"{LAUNCH}--gradient_accumulation_steps $N {TRAINS}", "gradient_accumulation_steps by N"),
        (f"{LAUNCH}--use_deepspeed --zero_stage $N {TRAINS}", "zero_stage by N"),
        (f"deepspeed --num_gpus 4 {TRAINS}--gradient_accumulation_steps $N", "gradient_accumulation_steps by N"),
        (f"{MEGATRON_FULL} --recompute-method $N --recompute-num-layers 1", "--recompute-method by N"),
    ],
)
def test_a_variable_that_nobody_sets_is_asked_for_under_each_name_of_its_setting(line: str, needs: str) -> None:
    texts = script(line) if line.startswith("torchrun") else script(line) | MODEL
    assert any(f"{needs})" in fault and "--set N=VALUE" in fault for fault in faults(texts))


def test_a_variable_of_the_user_counts_where_it_was_asked_for() -> None:
    texts = script(LAUNCH + TRAINS + "--gradient_accumulation_steps $N") | MODEL
    assert job_read(texts, "N=8")[1].job.batch.global_batch_size == 64


@pytest.mark.parametrize(
    ("key", "value", "is_remark"),
    [
        ("_context", "the run of last week, with longer sequences", True),
        ("_comment_batch", "auto", True),
        ("//size", "of a microbatch", True),
        ("_context", "4096", False),
        ("context_size", "of last week", False),
    ],
)
def test_remarks_of_a_json_are_no_settings(key: str, value: str, is_remark: bool) -> None:
    config = json.dumps({key: value, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}})
    texts = script(DEEPSPEED, ds_json=config) | MODEL
    if is_remark:
        assert job_read(texts)[1].job.plan.zero == 1
    else:
        assert any("could change the model" in fault for fault in faults(texts))


@pytest.mark.parametrize("tool", ["llamafactory-cli train", "python3 -u -m llamafactory.cli train"])
def test_llama_factory_as_a_module_is_its_command(tool: str) -> None:
    options = "--stage sft --do_train --finetuning_type full --template x --per_device_train_batch_size 1 "
    line = f"FORCE_TORCHRUN=1 CUDA_VISIBLE_DEVICES=0,1,2 {tool} {options} --model_name_or_path me/mine"
    system, result = job_read(script(line) | MODEL)
    job = result.job
    assert (system, job.plan.world, job.model.sequence, job.plan.recompute) == ("llamafactory", 3, 2048, "full")


@pytest.mark.parametrize(
    "tool", ["swift sft", "python -m swift.cli.sft", "python -m swift.cli.main sft", "python swift/cli/sft.py"]
)
def test_ms_swift_as_a_module_has_its_defaults(tool: str) -> None:
    line = f"NPROC_PER_NODE=2 {tool} --model me/mine --dataset d --max_length 512 --lora_rank 4 --tuner_type lora"
    system, result = job_read(script(line) | MODEL)
    assert (system, result.job.plan.world, result.job.model.adapter.rank) == ("ms-swift", 2, 4)
    assert result.job.optimizer.learning_rate == 1e-4 and result.job.batch.global_batch_size == 16


def test_a_program_that_trains_by_options_in_a_json_is_read_without_a_launcher() -> None:
    options = {"model_name_or_path": "me/mine", "per_device_train_batch_size": 3, "block_size": 256, "fp16": True}
    texts = script("python3 steps/sft_mine.py steps/options.json", options_json=json.dumps(options)) | MODEL
    job = job_read(texts, devices=2)[1].job
    assert (job.plan.world, job.batch.global_batch_size, job.model.sequence) == (2, 6, 256)
    (fault,) = faults(script("python3 steps/convert.py steps/options.json") | MODEL)
    assert "no command in it trains a model" in fault


def test_the_switch_of_longlora_asks_for_the_adapters() -> None:
    line = f"torchrun --nproc_per_node 2 mine.py --low_rank_training {{}} {OPTIONS}"
    assert any("nothing says the rank" in fault for fault in faults(script(line.format("True")) | MODEL))
    assert not job_read(script(line.format("False")) | MODEL)[1].job.model.adapter.rank


@pytest.mark.parametrize(
    ("option", "name", "is_told"),
    [
        ("--optimizer sgd", "sgd", False),
        ("--optimizer 'name=sgd, lr=1e-4'", "sgd", False),
        ("--optimizer_name adafactor", "adafactor", False),
        ("--optimizer AdamW", "adamw", False),
        ("--optimizer shampoo", "adamw", True),
    ],
)
def test_optimizers_of_own_programs_count(option: str, name: str, is_told: bool) -> None:
    result = job_read(script(f"torchrun --nproc_per_node 2 mine.py {option} {OPTIONS}") | MODEL)[1]
    assert result.job.optimizer.name == name
    assert any("AdamW with two moments" in note for note in result.lost) == is_told


def test_a_module_that_installs_an_engine_trains_nothing() -> None:
    line = "python -m pip install deepspeed"
    assert job_read(script(f"torchrun --nproc_per_node 2 mine.py {OPTIONS}", line) | MODEL)[1].job.plan.world == 2
    (fault,) = faults(script("pip install accelerate", line) | MODEL)
    assert "no command in it trains a model" in fault


@pytest.mark.parametrize("argument", ["options.yaml", '"$CONFIG"'])
def test_a_program_that_torchrun_starts_with_a_yaml_of_options_is_read(argument: str) -> None:
    options = "model_name_or_path: me/mine\nper_device_train_batch_size: 3\nmax_seq_length: 256\nbf16: true\n"
    lines = ("CONFIG=${1:-options.yaml}", f"torchrun --nproc_per_node 2 steps/mine.py {argument}")
    job = job_read(script(*lines, options_yaml=options) | MODEL)[1].job
    assert (job.plan.world, job.batch.global_batch_size, job.model.sequence) == (2, 6, 256)


@pytest.mark.parametrize(("value", "is_asked"), [("lion", True), ("'name=sgd,lr=1'", True), ("adamw", False)])
def test_an_optimizer_under_an_unknown_name_is_asked_about(value: str, is_asked: bool) -> None:
    texts = script(f"torchrun --nproc_per_node 2 mine.py --opt_kind {value} {OPTIONS}") | MODEL
    if is_asked:
        assert any("--opt_kind" in fault and "could change the model" in fault for fault in faults(texts))
    else:
        assert job_read(texts)[1].job.optimizer.name == "adamw"


def test_devices_are_asked_for_once() -> None:
    lines = "accelerate launch --num_machines $NODES --num_processes $COUNT mine.py "
    about = [fault for fault in faults(script(lines + OPTIONS) | MODEL) if "how many GPUs there are" in fault]
    assert len(about) == 1 and "--set NODES=VALUE" in about[0]


SWIFT_YAML = "model: me/mine\ntuner_type: lora\ndataset: d\nmax_length: 512\nlora_rank: 4\n"


def test_a_yaml_of_swift_sft_is_read_with_its_options() -> None:
    texts = {"s.yaml": SWIFT_YAML + "learning_rate: 3e-4\nper_device_train_batch_size: 2\n"} | MODEL
    system, result = job_read(texts, devices=4)
    job = result.job
    assert (system, job.plan.world, job.plan.zero, job.plan.recompute) == ("ms-swift", 4, 0, "full")
    assert (job.optimizer.learning_rate, job.batch.global_batch_size) == (3e-4, 16)
    of_megatron = {"s.yaml": SWIFT_YAML + "lr: 3e-4\nmicro_batch_size: 2\nglobal_batch_size: 16\n"} | MODEL
    assert job_read(of_megatron, devices=4)[1].job.plan.zero == 1
    started = script("NPROC_PER_NODE=2 swift sft s.yaml") | texts
    assert job_read(started)[1].job.plan.world == 2


def test_sizes_are_asked_for_beside_a_model_that_is_not_known() -> None:
    line = "NPROC_PER_NODE=8 megatron sft --model $NAME --dataset d --tensor_model_parallel_size $TP --max_length $LONG"
    needs, model = faults(script(line))
    assert "tensor_model_parallel_size by TP" in needs and "max_length by LONG" in needs
    assert "is not in the catalog" in model
