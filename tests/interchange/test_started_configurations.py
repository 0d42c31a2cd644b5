"""Scripts that start a program with its own configuration: nanotron, picotron, GPT-NeoX."""

from pathlib import Path

import pytest

from interchange.test_habits_of_files import MEGATRON, faults, megatron, script
from interchange.test_trainer_commands import FOLDER, MODEL
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked, Imported
from shardwright.interchange.named_files import engine_texts
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES

NAMES = ("nanotron.yaml", "picotron.json", "neox.yml", "neox-data.yml")
FILES = {name: (FOLDER / name).read_text(encoding="utf-8") for name in NAMES}


def started(line: str, *names: str, changed: tuple[str, str] = ("", "")) -> tuple[str, Imported]:
    """The system of a script of a line with some files, of which a word is another, and its job."""
    configurations = {name: FILES[name].replace(*changed) for name in names}
    texts = script(line) | configurations
    system = system_name_of("run.sh", texts["run.sh"], configurations=configurations)
    return system, job_of_texts(SOURCES[system], texts | MODEL, Asked(), "run.sh")


@pytest.mark.parametrize(
    ("line", "names", "expected"),
    [
        ("torchrun --nproc_per_node=8 --nnodes 2 \\\n run_train.py --config-file x/nanotron.yaml", NAMES[:1],
         ("nanotron", 16, 2, 48)),
        ("torchrun --nproc_per_node=16 run_train.py --config-file=$CONFIG", NAMES[:1], ("nanotron", 16, 1, 48)),
        ("torchrun --nproc_per_node 8 --nnodes 2 train.py --config x/picotron.json", NAMES[1:2],
         ("picotron", 16, 2, 64)),
        ("#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\npython ./deepy.py train.py neox.yml neox-data.yml", NAMES[2:],
         ("gpt-neox", 16, 2, 128)),
    ],
)  # fmt: skip
def test_a_script_is_read_by_the_configuration_that_its_program_takes(
    line: str, names: tuple[str, ...], expected: tuple[str, int, int, int]
) -> None:
    if "nanotron" in names[0]:  # a model of its own
        line = f"if ! HOSTS=$(scontrol show hostnames); then\n exit 1\nfi\n{line}"
    texts = script(line) | {name: FILES[name] for name in names}
    system = system_name_of("run.sh", texts["run.sh"], configurations={name: FILES[name] for name in names})
    model = {} if system in ("nanotron", "gpt-neox") else MODEL
    job = job_of_texts(SOURCES[system], texts | model, Asked(), "run.sh").job
    assert (system, job.plan.world, job.cluster.nodes, job.batch.global_batch_size) == expected


def test_the_ranks_of_the_script_are_those_of_the_degrees() -> None:
    line = "torchrun --nproc_per_node=8 run_train.py --config-file nanotron.yaml"
    with pytest.raises(PlanError, match="starts 8 ranks, and the file has dp 4 x tp 2 x pp 2 x cp 1 = 16"):
        job_of_texts(SOURCES["nanotron"], script(line) | {NAMES[0]: FILES[NAMES[0]]}, Asked(), "run.sh")


def test_a_configuration_that_is_not_there_is_asked_for_and_one_beside_the_script_is_read(tmp_path: Path) -> None:
    (fault,) = faults(script("torchrun --nproc_per_node=16 run_train.py --config-file nanotron.yaml"))
    assert "nanotron.yaml has the options of the program, and is not read" in fault
    (fault,) = faults(script("torchrun --nproc_per_node=16 run_train.py --config-file $CONFIG"))
    assert "(--config-file $CONFIG), which is no file here" in fault
    for line, name in (("run_train.py --config-file", NAMES[0]), ("train.py --config", NAMES[1])):
        (tmp_path / name).write_text(FILES[name], encoding="utf-8")
        elsewhere = engine_texts(tmp_path / "run.sh", script(f"torchrun {line} conf/{name} --x")).values()
        assert [*elsewhere] == []
        named = engine_texts(tmp_path / "run.sh", {str(tmp_path / "run.sh"): f"torchrun {line} {name} --x"})
        assert [Path(path).name for path in named] == [name]


def test_forks_of_picotron_say_sequence_parallelism_and_whose_heads_ranks_trade() -> None:
    words = '"tp_size": 2, "sequence_parallel": true, "cp_mode": "headwise"'
    line = "torchrun --nproc_per_node 16 train.py --config picotron.json"
    plan = started(line, NAMES[1], changed=('"tp_size": 2', words))[1].job.plan
    assert (plan.tp, plan.sequence_parallel, plan.cp_method) == (2, True, "ulysses")
    words = '"tp_size": 2, "cp_mode": "tree"'
    with pytest.raises(PlanError, match="cp_mode tree"):
        started(line, NAMES[1], changed=('"tp_size": 2', words))


@pytest.mark.parametrize(
    "guard",
    [
        'if ! OUT=$(nvidia-smi -L); then echo none; exit 1; fi',
        'if ! OUT="$(nvidia-smi -L)"; then exit 1; else echo $OUT; fi',
        "! OUT=$(nvidia-smi -L) && exit 1",
        "OUT=$(nvidia-smi -L) || exit 1",
        "if ! command -v nvidia-smi > /dev/null; then exit 1; fi",
        "if ! [ -d out ]; then exit 1; fi",
    ],
)  # fmt: skip
def test_a_guard_around_what_a_command_prints_is_passed(guard: str) -> None:
    assert megatron(guard).job.plan.dp == 8


def test_a_value_behind_a_guard_is_asked_for_by_its_name() -> None:
    (fault,) = faults(script("if ! SIZE=$(probe); then SIZE=16; fi", f"{MEGATRON} --global-batch-size $SIZE"))
    assert "--global-batch-size by SIZE" in fault


@pytest.mark.parametrize(
    ("flags", "gradients", "moments"),
    [
        ("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16", "compute", "float32"),
        (
            "--bf16 --main-grads-dtype fp32 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95",
            "float32",
            "bf16",
        ),
    ],
)
def test_types_of_the_optimizer_are_those_of_gradients_and_moments(flags: str, gradients: str, moments: str) -> None:
    precision = megatron(flags=f"--use-distributed-optimizer {flags}").job.precision
    assert (precision.gradients, precision.moments) == (gradients, moments)


def test_moments_of_a_type_that_is_not_here_are_settled_by_a_field() -> None:
    flags = "--bf16 --use-distributed-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
    assert all("--set precision.moments=" in fault for fault in faults(script(MEGATRON + flags)))
    with_field = faults(script(MEGATRON + flags.replace("fp8", "fp3", 1)), "precision.moments=nothing")
    assert not any("exp-avg" in fault for fault in with_field)


@pytest.mark.parametrize(
    "line",
    [
        "torchrun scripts/training/run_recipe.py --recipe x",
        "python run_recipe.py",
        "scripts/performance/run.sh",
        "launch_with_nemo_run.py",
    ],
)
def test_scripts_of_megatron_bridge_are_refused_by_name(line: str) -> None:
    with pytest.raises(PlanError, match="Megatron-Bridge"):
        system_name_of("run.sh", script(line)["run.sh"])
