"""Habits of public files: how scripts say what they need, which program they start, what options mean there."""

from pathlib import Path

import pytest

from interchange.test_trainer_commands import FACTORY, FOLDER, MODEL, job_read
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked, Imported
from shardwright.interchange.named_files import engine_texts, model_texts
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES

MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-4 --vocab-size 128 "
)
OPTIONS = "--model_name_or_path me/mine --per_device_train_batch_size 2 --learning_rate 1e-4 --output_dir x "


def script(*lines: str, **files: str) -> dict[str, str]:
    """A script of some lines, and further files by name, with _ before their suffix."""
    named = {name.replace("_json", ".json").replace("_yaml", ".yaml"): text for name, text in files.items()}
    return {"run.sh": "\n".join(("#!/bin/bash", *lines, ""))} | named


def megatron(*lines: str, flags: str = "") -> Imported:
    return job_read(script(*lines, MEGATRON + flags))[1]


def faults(texts: dict[str, str], *sets: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        job_read(texts, *sets)
    return caught.value.faults


@pytest.mark.parametrize("line", [': "${SIZE:=16}"', ": ${SIZE:=16}", "echo ${SIZE:=16}"])
def test_a_default_that_is_assigned_in_a_word_is_kept(line: str) -> None:
    assert megatron(line, flags="--global-batch-size $SIZE").job.batch.global_batch_size == 16


def test_arithmetic_that_cannot_be_known_is_asked_for_only_where_it_counts() -> None:
    lines = ("left=(`squeue -h`)", "MINUTES=$((left[0]*60 - 15))", "SIZE=$((GPUS * 2))")
    assert megatron(*lines, flags="--exit-duration-in-mins $MINUTES").job.plan.dp == 8
    (fault,) = faults(script(*lines, MEGATRON + "--global-batch-size $SIZE"))
    assert "--global-batch-size by GPUS" in fault


def test_a_loop_over_arguments_that_nobody_gives_does_nothing() -> None:
    loop = 'while [[ "$1" != "" ]]; do case $1 in --size) shift; SIZE=$1 ;; esac; shift; done'
    assert megatron("SIZE=32", loop, flags="--global-batch-size $SIZE").job.batch.global_batch_size == 32


def test_a_program_of_python_in_a_word_is_no_shell() -> None:
    assert megatron("python3 -u -c 'for line in iter(input, 0): print(line)' | tee log").job.plan.dp == 8


def test_options_behind_a_comment_are_no_options_of_the_command() -> None:
    lines = ("deepspeed --num_gpus 2 finetune.py \\", "    # which model", f"    {OPTIONS} --deepspeed z.json")
    (fault,) = faults(script(*lines, z_json="{}") | MODEL)
    assert "line 4: --model_name_or_path begins a command of its own" in fault
    answer = megatron(flags="--bf16\n--save here --load here")
    assert any("--save begins a command of its own" in note for note in answer.assumed)


@pytest.mark.parametrize(
    ("launcher", "shape"),
    [
        ("deepspeed --include localhost:0,1,4", (1, 3)),
        ("deepspeed --include a:0,1@b:2,3", (2, 2)),
        ("msrun --worker_num 16 --local_worker_num 8 python", (2, 8)),
    ],
)
def test_ranks_of_more_launchers_are_counted(launcher: str, shape: tuple[int, int]) -> None:
    zero = '{"zero_optimization": {"stage": 2}}'
    line = f"{launcher} finetune.py {OPTIONS} --deepspeed z.json"
    cluster = job_read(script(line, z_json=zero) | MODEL)[1].job.cluster
    assert (cluster.nodes, cluster.devices_per_node) == shape


# A line of a script -> the system whose program it starts.
STARTED = {
    "accelerate": (
        f"torchrun --nproc_per_node 4 train.py {OPTIONS} --fsdp 'full_shard auto_wrap'",
        f"# deepspeed --deepspeed z.json\npython train.py {OPTIONS}",
        f"accelerate launch --config_file a.yaml train.py {OPTIONS} --deepspeed z.json",
    ),
    "deepspeed": (
        f"torchrun train.py {OPTIONS} --deepspeed $CONFIG",
        f"deepspeed main.py {OPTIONS} --zero_stage 2 --deepspeed",
        f"deepspeed train.py --hidden_size 64 {OPTIONS} --deepspeed z.json",
    ),
    "llamafactory": ("accelerate launch --config_file a.yaml src/train.py sft.yaml",),
    "megatron": (MEGATRON + "--deepspeed --deepspeed_config z.json",),
}


@pytest.mark.parametrize(("system", "line"), [(name, line) for name, lines in STARTED.items() for line in lines])
def test_a_script_is_known_by_its_command(system: str, line: str) -> None:
    assert system_name_of("run.sh", f"#!/bin/bash\n{line}\n") == system


@pytest.mark.parametrize(
    ("line", "title"),
    [
        ("torchrun --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer data.x=1", "verl"),
        ("read -r -d '' C <<EOF\nopenrlhf.cli.train_sft\nEOF\ndeepspeed --module $C", "OpenRLHF"),
        ("python scripts/performance/run_script.py --model_recipe_name a", "Megatron-Bridge's scripts"),
    ],
)
def test_programs_that_are_not_read_are_refused_by_name(line: str, title: str) -> None:
    with pytest.raises(PlanError, match=title):
        system_name_of("run.sh", f"#!/bin/bash\n{line}\n")


@pytest.mark.parametrize(
    ("flags", "rank", "targets"),
    [
        ("--use_peft_lora True --lora_r 8 --lora_target_modules q_proj,v_proj", 8, ("query", "value")),
        ("--train_mode lora --lora_rank 4 --lora_target_modules v_proj", 4, ("value",)),
        ("--use_lora True --lora_r 4 --lora_target_modules o_proj down_proj", 4, ("out", "down")),
    ],
)
def test_adapters_are_read_by_the_switch_of_a_program(flags: str, rank: int, targets: tuple[str, ...]) -> None:
    job = job_read(script(f"torchrun --nproc_per_node 2 train.py {OPTIONS} {flags}") | MODEL)[1].job
    assert (job.model.adapter.rank, job.model.adapter.targets) == (rank, targets)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--use_lora True", "nothing says the rank"),
        ("--train_mode qdora", "train_mode = qdora"),
        ("--my_way freeze", "my_way = freeze"),
        ("--spectrum_config_path snr.yaml", "spectrum_config_path"),
        ("--use_lisa 1 --lisa_activated_layers 2", "use_lisa"),
    ],
)
def test_what_trains_a_part_is_asked_for_or_refused(flags: str, words: str) -> None:
    texts = script(f"torchrun --nproc_per_node 2 train.py {OPTIONS} {flags}") | MODEL
    assert any(words in fault for fault in faults(texts))


@pytest.mark.parametrize(
    ("flags", "base", "is_double"),
    [
        ("--train_mode lora", "compute", False),
        ("--train_mode qlora", "nf4", True),
        ("--train_mode qlora --double_quantization false", "nf4", False),
    ],
)
def test_a_word_loads_a_base_in_4_bits(flags: str, base: str, is_double: bool) -> None:
    job = job_read(script(f"torchrun --nproc_per_node 2 train.py {OPTIONS} {flags}") | MODEL)[1].job
    adapter = job.model.adapter
    assert (adapter.rank, adapter.base, adapter.double_quantization) == (64, base, is_double)


def test_a_program_that_always_trains_adapters_is_known_by_its_name() -> None:
    flags = "--lora_rank 4 --trainable q_proj,v_proj"
    texts = script(f"torchrun --nproc_per_node 2 run_with_peft.py {OPTIONS} {flags}") | MODEL
    assert job_read(texts)[1].job.model.adapter.targets == ("query", "value")
    texts["run.sh"] = texts["run.sh"].replace(flags, f"{flags} --modules_to_save lm_head")
    assert any("modules_to_save" in fault for fault in faults(texts))


def test_a_batch_that_is_said_whole_counts() -> None:
    text = FACTORY["l.yaml"] + "global_batch_size: 16\ndeepspeed: z.json\n"
    zero = '{"zero_optimization": {"stage": 2}}'
    assert job_read({"l.yaml": text, "z.json": zero} | MODEL, devices=8)[1].job.batch.global_batch_size == 16
    with pytest.raises(PlanError, match="global_batch_size"):
        job_read({"l.yaml": text.replace("_size: 16", "_size: 17"), "z.json": zero} | MODEL, devices=8)


def test_a_command_in_a_loop_over_hosts_is_found() -> None:
    loop = f'for ip in `cat hosts`; do ssh $ip eval "cd . && {MEGATRON.strip()} --node_rank $i"; done'
    assert job_read(script(loop), devices=8)[1].job.plan.dp == 8


def test_lengths_of_question_and_answer_are_the_length_of_a_sample() -> None:
    line = f"torchrun --nproc_per_node 2 train.py {OPTIONS} --source_max_len 16 --target_max_len 48"
    assert job_read(script(line) | MODEL)[1].job.model.sequence == 64


def test_a_program_of_deepspeeds_own_has_numbers_of_its_own() -> None:
    line = f"deepspeed --num_gpus 4 main.py {OPTIONS} --zero_stage 2 --deepspeed"
    assert job_read(script(line) | MODEL)[1].job.precision.compute == "fp16"
    assert job_read(script(f"{line} --dtype bf16") | MODEL)[1].job.precision.compute == "bf16"


def test_sequences_are_shared_beside_deepspeeds_stages() -> None:
    zero = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
    axolotl = (
        "base_model: me/mine\nsequence_len: 8192\nmicro_batch_size: 1\ndatasets: [{path: a}]\nlearning_rate: 2e-5\n"
        "bf16: auto\ndeepspeed: z.json\nsequence_parallel_degree: 4\n"
    )
    plan = job_read({"a.yaml": axolotl, "z.json": zero} | MODEL, devices=8)[1].job.plan
    assert (plan.dp, plan.cp, plan.cp_method, plan.zero) == (2, 4, "ring", 3)
    accelerate = (
        "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: bf16\n"
        "deepspeed_config: {zero_stage: 3, seq_parallel_communication_data_type: bf16}\n"
        "parallelism_config: {parallelism_config_sp_size: 2, parallelism_config_dp_shard_size: 2, "
        "parallelism_config_sp_backend: deepspeed, parallelism_config_sp_seq_length_is_variable: true}\n"
    )
    plan = job_read({"a.yaml": accelerate} | MODEL)[1].job.plan
    assert (plan.dp, plan.cp, plan.cp_method) == (2, 2, "ulysses")


@pytest.mark.parametrize(("backend", "recipe"), [("TE", "delayed"), ("AO", "tensorwise")])
def test_accelerates_recipe_of_fp8_is_read(backend: str, recipe: str) -> None:
    text = (
        "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp8\n"
        f"fp8_config: {{backend: {backend}, amax_history_len: 16}}\n"
    )
    precision = job_read({"a.yaml": text} | MODEL)[1].job.precision
    assert (precision.float8, precision.float8_history) == (recipe, 16)


def test_how_many_experts_a_token_has_is_told_where_nothing_says_it() -> None:
    answer = megatron(flags="--num-experts 4")
    assert answer.job.model.moe.top_k == 2 and any("earlier ones have 1" in line for line in answer.assumed)
    assert not any("earlier" in line for line in megatron(flags="--num-experts 4 --moe-router-topk 2").assumed)


def test_a_vocabulary_of_another_model_is_asked_for() -> None:
    files = "--vocab-file neox-20b/vocab.json --merge-file neox-20b/merges.txt"
    (fault,) = faults(script(MEGATRON.replace("--vocab-size 128", files)))
    assert "is not GPT-2's by its name" in fault
    own = "--vocab-file gpt-neox/gpt2-vocab.json --merge-file gpt-neox/gpt2-merges.txt"
    assert job_read(script(MEGATRON.replace("--vocab-size 128", own)))[1].job.model.vocab == 50304


MINDSPEED = (
    "--num-layers 8 --pipeline-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--first-k-dense-replace 1 --moe-layer-freq 1 --n-shared-experts 2", {"first_dense": 1, "shared_ffn": 32}),
        ("--moe-layer-freq -1 --norm-topk-prob --moe-router-pre-softmax", {"first_dense": 0, "normalise": True}),
        ("--recompute-activation-function", {"recompute_operators": ["activation"]}),
        ("--num-layer-list 3,5 --seq-aux --moe-aux-loss-coeff 0.1", {"layout": (3, 5), "aux_scope": "sequence"}),
        ("--noop-layers 0,1 --first-k-dense-replace 3", {"layout": (2, 4), "layers": 6, "first_dense": 1}),
        ("--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", {"cp_method": "ulysses"}),
        ("--moe-tp-extend-ep --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
         {"ep": 4, "expert_tp": 1}),
    ],
)  # fmt: skip
def test_flags_of_mindspeed_are_read_by_megatrons_names(flags: str, expected: dict[str, object]) -> None:
    job = megatron(flags=f"{MINDSPEED}--stage sft --handler-name A {flags}").job
    result = {name: getattr(part, name) for part in (job.model, job.plan, job.model.moe) for name in expected
             if hasattr(part, name)}  # fmt: skip
    assert {name: tuple(value) if name == "layout" else value for name, value in result.items()} == expected


def test_what_mindspeed_moves_to_the_host_is_refused_with_a_way_out() -> None:
    (fault,) = faults(script(MEGATRON + MINDSPEED + "--swap-optimizer --swap-attention --norm-topk-prob"))
    assert "--set swap-optimizer=ignore --set swap-attention=ignore" in fault


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ("--enable-zbh1-pipeline", "zb-h1"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 2", "zb-h1"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 4", "zb-h2"),
        ("--enable-zero-bubble --zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half", "v-half"),
    ],
)
def test_schedules_without_bubbles_of_forks_are_read(flags: str, schedule: str) -> None:
    assert megatron(flags=f"--pipeline-model-parallel-size 2 {flags}").job.plan.schedule == schedule


def test_a_configuration_that_a_file_names_is_read_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "config.json").write_text(MODEL["config.json"])
    (tmp_path / "conf/z.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    (tmp_path / "conf/other.json").write_text('{"zero_optimization": {"stage": 1}}')
    run = tmp_path / "scripts/run.sh"
    run.write_text(f"#!/bin/bash\ndeepspeed --num_gpus 8 train.py {OPTIONS} --deepspeed conf/z.json\n")
    model = str(tmp_path / "config.json")
    job = read_job_of(SOURCES["deepspeed"], (str(run), model), Asked())
    assert job.job.plan.zero == 3 and any("conf/z.json is read, which the files name" in note for note in job.assumed)
    with pytest.raises(PlanError, match=r"conf/z\.json is a file that is not read"):
        read_job_of(SOURCES["deepspeed"], (str(run), str(tmp_path / "conf/other.json"), model), Asked())
    run.write_text(run.read_text().replace("conf/z.json", "../conf/z.json"))
    assert read_job_of(SOURCES["deepspeed"], (str(run), model), Asked()).job.plan.zero == 3
    run.write_text(run.read_text().replace("../conf/z.json", "x/../../conf/z.json"))
    with pytest.raises(PlanError, match=r"conf/z\.json is a file that is not read"):
        read_job_of(SOURCES["deepspeed"], (str(run), model), Asked())


@pytest.mark.parametrize("named", ["conf/z.json", "m/config.json"])
@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ('{"说明": 1}'.encode("gbk"), "is not UTF-8 text"),
        ('{"bf16": {}}'.encode("utf-16"), "is not UTF-8 text"),
        (b" " * (2**20 + 1), "at most 1,048,576 are read here"),
    ],
)
def test_a_named_file_that_can_not_be_read_is_a_fault(named: str, contents: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / named).parent.mkdir()
    (tmp_path / named).write_bytes(contents)
    run = tmp_path / "run.sh"
    options = OPTIONS.replace("me/mine", "m")
    run.write_text(f"#!/bin/bash\ndeepspeed --num_gpus 4 train.py --deepspeed conf/z.json {options}\n")
    with pytest.raises(PlanError, match=words) as caught:
        read_job_of(SOURCES["deepspeed"], (str(run),), Asked())
    assert named in caught.value.faults[0]


@pytest.mark.long
def test_names_of_files_are_looked_for_in_a_time_that_grows_no_faster_than_a_text(tmp_path: Path) -> None:
    """Of a line of a million characters that may begin a name at each third; and no file has a name of 300 of them."""
    text = f"deepspeed --deepspeed {'x' * 300}.json --model_name_or_path {'m' * 300}\n# {'ds-' * 300_000}\n"
    texts = {"run.sh": text.replace("#", "echo")}
    assert engine_texts(tmp_path / "run.sh", texts) == model_texts(tmp_path / "run.sh", texts) == {}


MIXED = (
    "model_name_or_path: me/mine\nstage: sft\ndo_train: true\nfinetuning_type: full\ntemplate: default\nbf16: true\n"
    "cutoff_len: 64\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nlr_scheduler_type: cosine\n"
    "num_train_epochs: 2\ntensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\nsequence_parallel: true\n"
    "use_distributed_optimizer: true\nrecompute_granularity: full\n"
)


def test_numbers_of_a_batch_may_be_quoted_and_words_are_asked_for() -> None:
    def texts(steps: str) -> dict[str, str]:
        return {"l.yaml": MIXED.replace("gradient_accumulation_steps: 4", f"gradient_accumulation_steps: {steps}")}

    assert job_read(texts('"4"') | MODEL, devices=8)[1].job.batch.global_batch_size == 16
    for steps in ("${STEPS}", "0", "true"):
        with pytest.raises(PlanError, match=r"gradient_accumulation_steps = .* is no whole number of at least 1"):
            job_read(texts(steps) | MODEL, devices=8)


def test_megatrons_arguments_in_llama_factorys_file_split_the_model() -> None:
    system, result = job_read({"l.yaml": MIXED} | MODEL, devices=8)
    plan = result.job.plan
    assert (system, plan.dp, plan.tp, plan.pp, plan.zero, plan.recompute) == ("llamafactory", 2, 2, 2, 1, "full")
    assert (result.job.batch.global_batch_size, result.job.model.sequence) == (16, 64)
    assert not result.unknown and any("num_train_epochs" in line for line in result.lost)
    adapted = MIXED.replace("finetuning_type: full", "finetuning_type: lora\nlora_rank: 4")
    assert job_read({"l.yaml": adapted} | MODEL, devices=8)[1].job.model.adapter.rank == 4
    for old, new, word in (("stage: sft", "stage: dpo", "DPO"), ("_type: full", "_type: freeze", "finetuning_type")):
        assert any(word in fault for fault in faults({"l.yaml": MIXED.replace(old, new)} | MODEL))


def test_what_a_launcher_names_is_asked_for_beside_a_programs_file() -> None:
    line = "accelerate launch --num_processes 2 --config_file a.yaml src/train.py l.yaml"
    assert any("config_file = a.yaml" in fault for fault in faults(script(line, l_yaml=FACTORY["l.yaml"]) | MODEL))


def test_experts_of_nanotron_are_read() -> None:
    text = (FOLDER / "nanotron.yaml").read_text(encoding="utf-8").replace("is_llama_config", "is_qwen2_config")
    experts = "moe_config: {num_experts: 4, top_k: 1, moe_intermediate_size: 32, enable_shared_expert: true}"
    job = job_read({"nanotron.yaml": text.replace("is_qwen2_config: true", f"is_qwen2_config: true\n    {experts}")})[
        1
    ].job
    moe = job.model.moe
    assert (moe.experts, moe.top_k, moe.ffn, moe.shared_ffn, moe.shared_gate) == (4, 1, 32, 5632, True)
    assert moe.aux_loss == "none" and not moe.normalise


def test_a_program_may_ask_for_deepspeed_under_accelerates_launcher() -> None:
    line = f"accelerate launch --num_processes 8 train.py {OPTIONS} --bf16 True --deepspeed z.json"
    zero = '{"zero_optimization": {"stage": 2}}'
    system, result = job_read(script(line, z_json=zero) | MODEL)
    assert (system, result.job.plan.zero, result.job.plan.dp) == ("accelerate", 2, 8)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("train: {train_iters: 5, global_batch_size: 8, micro_batch_size: 1}\nmodel: {seq_length: 64}\n", "Bridge"),
        ("train: {global_batch_size: 8, micro_batch_size: 1}\nprecision: bf16-true\ndata: {class_path: a}\n", "LitGPT"),
    ],
)
def test_configurations_that_are_not_read_have_their_own_names(text: str, title: str) -> None:
    with pytest.raises(PlanError, match=title):
        system_name_of("job.yaml", text)


def test_experts_in_float8_and_overlapped_products_of_torchtitan_are_told() -> None:
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 64\n[float8]\nmoe_fqns = ["experts"]\n'
        "[experimental]\nenable_async_tensor_parallel = true\n"
    )
    (line,) = [line for line in job_read({"t.toml": text}, devices=8)[1].lost if "the time of a step" in line]
    assert "float8.moe_fqns" in line and "experimental.enable_async_tensor_parallel" in line
