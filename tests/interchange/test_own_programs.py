"""Programs of people's own: with alpaca-lora's options, with sections for adapters, on GPUs that srun gives."""

import pytest

from interchange.test_habits_of_files import OPTIONS, faults, script
from interchange.test_trainer_commands import MODEL, job_read
from shardwright.config.base import PlanError

OWN = "--base_model me/mine --batch_size 64 --micro_batch_size 4 --cutoff_len 96 --learning_rate 3e-4 --num_epochs 3 "
LORA = """--lora_r 4 --lora_alpha 32 --lora_target_modules '["q_proj", "down_proj"]' --val_set_size 20 """
START = "torchrun --nproc_per_node=4 own/tune_it.py "
ZERO = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
COMPUTE = "model.adapter.base=compute"


def test_a_batch_is_of_all_devices_and_a_microbatch_is_beside_it() -> None:
    system, answer = job_read(script(START + OWN + LORA) | MODEL, COMPUTE)
    job = answer.job
    assert (system, job.plan.dp, job.plan.microbatch_size, job.batch.global_batch_size) == ("accelerate", 4, 4, 64)
    assert (job.model.sequence, job.precision.compute, job.num_microbatches) == (96, "fp16", 4)
    adapter = job.model.adapter
    assert (adapter.rank, adapter.alpha, list(adapter.targets), adapter.base) == (4, 32, ["query", "down"], "compute")
    assert any("--batch_size = 64 is of all devices" in line for line in answer.assumed)


@pytest.mark.parametrize(
    ("options", "sets", "expected"),
    [
        (LORA, (), "loads its base in 8 bits"),
        ("", (), "trains adapters of rank 8 where none says another"),
        ("", ("model.adapter.rank=8",), "loads its base in 8 bits"),
        (LORA + "--load_in_8bit True", (), "--load_in_8bit = True"),
    ],
)
def test_what_such_options_leave_open_is_asked_for(options: str, sets: tuple[str, ...], expected: str) -> None:
    (fault,) = faults(script(START + OWN + options) | MODEL, *sets)
    assert expected in fault


def test_a_program_that_trains_all_weights_is_said_to_do_so() -> None:
    job = job_read(script(START + OWN + "--bf16") | MODEL, "ADAPTERS=none")[1].job
    assert (job.model.adapter.rank, job.precision.compute, job.batch.global_batch_size) == (0, "bf16", 64)
    nf4 = job_read(script(START + OWN + LORA) | MODEL, "model.adapter.base=nf4")[1].job
    assert nf4.model.adapter.base == "nf4"
    chosen = job_read(script(START + OWN + "--use_4bit True --lora_r 16") | MODEL)[1].job
    assert (chosen.model.adapter.base, list(chosen.model.adapter.targets)) == ("nf4", ["query", "value"])


def test_a_batch_that_devices_do_not_share_is_a_fault() -> None:
    (fault,) = faults(script(START + OWN.replace("--batch_size 64", "--batch_size 60") + LORA) | MODEL, COMPUTE)
    assert "batch.global_batch_size 60 does not split into dp 4 x microbatch_size 4" in fault
    (asked,) = faults(script("python own/tune_it.py " + OWN + LORA) | MODEL, COMPUTE)
    assert "nothing says how many GPUs there are" in asked


def test_a_yaml_whose_name_a_loop_makes_is_that_of_the_last() -> None:
    yaml = "model_name_or_path: me/mine\nper_device_train_batch_size: {}\nblock_size: 64\nlearning_rate: 1e-4\n"
    lines = ("for one in a b; do", '  torchrun --nproc_per_node=2 tune.py conf/x-"$one".yaml', "done")
    files = {f"x-{one}.yaml": yaml.format(size) for one, size in (("a", 2), ("b", 3))}
    assert job_read(script(*lines) | files | MODEL)[1].job.plan.microbatch_size == 3


@pytest.mark.parametrize("micro", ["--micro_batch_size=8", "--micro_train_batch_size 8"])
def test_what_no_option_says_is_as_the_program_has_it(micro: str) -> None:
    words = f"--base_model me/mine {micro} --lora_target_modules='[q_proj,v_proj]' --lora_r=16"
    answer = job_read(script(START + words) | MODEL, COMPUTE)[1]
    job = answer.job
    assert (job.plan.microbatch_size, job.batch.global_batch_size, job.model.sequence) == (8, 128, 256)
    assert (job.optimizer.learning_rate, job.precision.compute, job.model.adapter.rank) == (3e-4, "fp16", 16)
    assert any("--batch_size 128, --cutoff_len 256" in line for line in answer.assumed)
    steps = job_read(script(f"{START}{words} --gradient_accumulation_steps 3") | MODEL, COMPUTE)[1].job
    assert steps.batch.global_batch_size == 8 * 3 * 4


YAML = "model_name: me/mine\nper_device_train_batch_size: 2\nlearning_rate: 1e-4\nmax_length: 64\noutput_dir: x\n"
SECTION = "lora_config: {r: 4, lora_alpha: 8, lora_dropout: 0.1, target_modules: [q_proj, v_proj], bias: none}\n"


@pytest.mark.parametrize("start", ["", "accelerate launch --num_processes 8 train.py --config t.yaml"])
def test_a_section_for_adapters_is_read_where_a_switch_turns_it_on(start: str) -> None:
    def texts(more: str) -> dict[str, str]:
        return (script(start) if start else {}) | {"t.yaml": YAML + more} | MODEL

    adapter = job_read(texts(f"{SECTION}training_mode: lora\n"), devices=8)[1].job.model.adapter
    assert (adapter.rank, adapter.alpha, list(adapter.targets)) == (4, 8, ["query", "value"])
    assert job_read(texts(f"{SECTION}training_mode: full\n"), devices=8)[1].job.model.adapter.rank == 0
    (fault,) = [fault for fault in _faults(texts(SECTION)) if "adapters" in fault]
    assert "to have such adapters: --set model.adapter.rank=4" in fault
    further = SECTION.replace("bias: none", "use_dora: true") + "training_mode: lora\n"
    assert any("lora_config.use_dora" in fault for fault in _faults(texts(further)))


def test_fsdp_of_a_file_of_options_is_read() -> None:
    more = "fsdp: true\nfsdp_config: {sharding_strategy: FULL_SHARD, offload_params: false}\n"
    texts = script("accelerate launch --num_processes 8 train.py --config t.yaml") | {"t.yaml": YAML + more} | MODEL
    assert job_read(texts)[1].job.plan.zero == 3


def test_a_mean_of_weights_that_is_kept_beside_them_is_a_fault() -> None:
    assert any(
        "ema_eta = 0.4: this is not known here" in f for f in _faults({"t.yaml": YAML + "ema_eta: 0.4\n"} | MODEL)
    )
    assert job_read({"t.yaml": YAML + "use_ema: false\n"} | MODEL, devices=8)[1].job.plan.world == 8


def test_a_loss_by_another_model_is_refused() -> None:
    assert any(
        "kl_beta = 0.1: training by preferences" in f for f in _faults({"t.yaml": YAML + "kl_beta: 0.1\n"} | MODEL)
    )


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ("--gres=gpu:8 -n1 --ntasks-per-node=1 deepspeed --master_port 5", 8),
        ("--gpus-per-node=4 -N1 -n1 deepspeed", 4),
        ("--gres=gpu:8 -n1 deepspeed --num_gpus 2", 2),
        ("--gres=gpu:8 -n8 --ntasks-per-node=8", 8),
    ],
)
def test_a_launcher_of_deepspeed_that_is_one_task_starts_all_gpus_of_its_node(words: str, devices: int) -> None:
    own = "main.py --model_name_or_path me/mine --per_device_train_batch_size 2 --learning_rate 1e-4 --output_dir x"
    assert (
        job_read(script(f"srun {words} {own} --max_prompt_len 64 --max_ans_len 32") | MODEL)[1].job.plan.world
        == devices
    )


def test_a_script_without_its_arguments_is_told_where_they_stand() -> None:
    (fault,) = faults(script('case "${1:-help}" in start) python go.py;; *) echo "start";; esac'))
    assert "nobody gave the script its arguments, which stand behind --" in fault


@pytest.mark.parametrize(
    "runner", ["conda run -n own", "/opt/conda/bin/conda run --no-capture-output -p env", "pixi run"]
)
def test_a_command_that_an_environment_runs_is_read(runner: str) -> None:
    line = f"{runner} torchrun --nproc_per_node=4 train.py {OPTIONS} 2>&1 | tee own.log"
    assert job_read(script("conda activate base", line) | MODEL)[1].job.plan.dp == 4


@pytest.mark.parametrize(
    ("options", "devices"), [("-i worker-0:0,1", 2), ("-i a:0,1,2@b:0,1,2", 6), ("--include localhost:4", 1)]
)
def test_devices_that_deepspeeds_launcher_takes_are_counted(options: str, devices: int) -> None:
    assert (
        job_read(script(f"deepspeed {options} train.py {OPTIONS} --deepspeed z.json") | MODEL | {"z.json": ZERO})[
            1
        ].job.plan.world
        == devices
    )


@pytest.mark.parametrize("option", ["-H hosts", "-e worker-1:0"])
def test_hosts_of_deepspeeds_launcher_are_asked_for(option: str) -> None:
    texts = script(f"deepspeed {option} train.py {OPTIONS} --deepspeed z.json") | MODEL | {"z.json": ZERO}
    assert any("--devices" in fault for fault in faults(texts))


def test_options_with_dashes_are_told_to_be_of_a_parser_of_its_own() -> None:
    def notes(options: str) -> list[str]:
        texts = script(f"torchrun --nproc_per_node=4 own/fit.py {options}") | MODEL
        return [line for line in job_read(texts)[1].assumed if "a parser of its own" in line]

    (note,) = notes(OPTIONS.replace("_", "-"))
    assert note.startswith("own/fit.py ") and "--set plan.recompute=full" in note
    assert not notes(OPTIONS)


def _faults(texts: dict[str, str]) -> list[str]:
    with pytest.raises(PlanError) as caught:
        job_read(texts, devices=8)
    return caught.value.faults
