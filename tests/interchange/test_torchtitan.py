"""torchtitan's configuration functions are read without running them, and what can't be known is said."""

from pathlib import Path

import pytest

from interchange.test_faults import faults, read
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.interchange.exported import asked_of, exported
from shardwright.interchange.foreign_job import job_of_texts, read_job_of
from shardwright.interchange.imported import Asked, Imported
from shardwright.interchange.meaning import differences
from shardwright.interchange.system import SOURCES, SYSTEMS
from shardwright.interchange.systems.torchtitan import command_line

START = "torchrun --nproc_per_node 8 --nnodes 2 -m torchtitan.train --module mine --config big"
HEAD = """
import os
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

STEPS = 100
SHAPE = dict(seq_len=4096, steps=STEPS)

def base(lr: float = 3e-4) -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=default_adamw(lr),
        training=TrainingConfig(local_batch_size=2, **SHAPE),
    )
"""


def taken(body: str, flags: str = "", **sets: str) -> Imported:
    """The job of a function `big` with a body."""
    named = [f"{name}={value}" for name, value in sets.items()]
    return read("torchtitan", *named, run_sh=f"{START} {flags}", mine_py=HEAD + "\ndef big():\n" + body)


def wrong(body: str, flags: str = "") -> list[str]:
    return faults("torchtitan", run_sh=f"{START} {flags}", mine_py=HEAD + "\ndef big():\n" + body)


def test_batch_and_vocabulary_of_forks_are_read() -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 2\ngradient_accumulation_steps = 3\n'
    asked = Asked({}, {}, AskedCluster(4))
    job = job_of_texts(SYSTEMS["torchtitan-0.2"], {"t.toml": text + "vocab_size = 256\n"}, asked, "t").job
    assert (job.batch.global_batch_size, job.model.vocab, job.model.layers) == (24, 256, 32)


def test_fields_that_are_put_in_later_hold() -> None:
    job = taken(
        "    config = base(lr=1e-3)\n    config.parallelism.tensor_parallel_degree = 2 ** 2\n"
        "    config.training.steps += 20\n    config.activation_checkpoint = FullAC.Config()\n"
        '    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 2e-3\n    return config\n'
    ).job
    assert (job.plan.tp, job.plan.dp, job.plan.recompute, job.optimizer.steps) == (4, 4, "full", 120)
    assert (job.model.layers, job.model.sequence, job.optimizer.learning_rate) == (32, 4096, 2e-3)


@pytest.mark.parametrize(
    ("policy", "means"),
    [("None", "none"), ("SelectiveAC.Config()", "selective"), ("FullAC.Config(debug=True)", "full")],
)
def test_policies_of_recomputation(policy: str, means: str) -> None:
    assert taken(f"    c = base()\n    c.activation_checkpoint = {policy}\n    return c\n").job.plan.recompute == means


@pytest.mark.parametrize(
    ("mode", "means"), [("", "selective"), ("mode='full'", "full"), ("mode='none', early_stop=True", "none")]
)
def test_classes_before_policies_and_groups_of_parameters_are_read(mode: str, means: str) -> None:
    job = taken(
        f"    c = base()\n    c.activation_checkpoint = ActivationCheckpointConfig({mode})\n"
        "    c.optimizer = OptimizersContainer.Config(lr=2e-3, beta2=0.9, implementation='foreach')\n    return c\n"
    ).job
    assert (job.plan.recompute, job.optimizer.learning_rate, job.optimizer.beta2) == (means, 2e-3, 0.9)
    assert (job.optimizer.beta1, job.optimizer.weight_decay) == (0.9, 0.1)


def test_conditions_and_copies_are_followed() -> None:
    job = taken(
        "    from dataclasses import replace\n    config = base()\n    big = config.training.local_batch_size > 1\n"
        "    if big and STEPS in (100, 200):\n        return replace(config, parallelism=ParallelismConfig("
        "pipeline_parallel_degree=2, pipeline_parallel_schedule='GPipe'))\n    return config\n"
    ).job
    assert (job.plan.pp, job.plan.schedule) == (2, "gpipe")


def test_flags_hold_over_the_function() -> None:
    flags = "--training.seq-len=2048 --parallelism.tensor_parallel_degree 2 --parallelism.no-enable-sequence-parallel"
    flags += " --optimizer.param-groups.0.optimizer-kwargs.betas 0.8 0.9 activation-checkpoint:none"
    job = taken("    return base()\n", flags).job
    assert (job.model.sequence, job.plan.tp, job.plan.sequence_parallel, job.plan.recompute) == (2048, 2, False, "none")
    assert (job.optimizer.beta1, job.optimizer.beta2) == (0.8, 0.9)


def test_settings_of_older_releases_are_faults() -> None:
    flags = "--parallelism.expert_parallel_comm_backend deepep --parallelism.context_parallel_rotate_method alltoall"
    old, gone = wrong("    return base()\n", flags)
    assert old.endswith("is no setting of torchtitan 0.3; say model_registry.moe_comm_backend")
    assert gone.endswith("is no setting of torchtitan 0.3; take it out")


def test_values_of_flags() -> None:
    parts = "parallelism.module_fqns_per_model_part"
    words = ["--module=m", "--config", "c", "--a.no_b", "--a.d", "True", "--a.e", "None", f"--{parts}", "x,y", "z"]
    result = command_line(words)
    assert (result.module, result.config) == ("m", "c")
    assert result.given == {"a.b": False, "a.d": True, "a.e": None, parts: [["x", "y"], ["z"]]}


def test_groups_of_parameters_have_the_defaults_of_torch() -> None:
    result = taken(
        "    c = base()\n    c.optimizer = OptimizersContainer.Config("
        "param_groups=[\n        ParamGroupConfig(pattern='bias', optimizer_name='AdamW', "
        "optimizer_kwargs={'lr': 1.0}),\n"
        "        ParamGroupConfig(pattern='.*', optimizer_name='Adam', optimizer_kwargs={'lr': 0.5})])\n    return c\n"
    )
    own = result.job.optimizer
    assert (own.name, own.learning_rate, own.beta2, own.weight_decay) == ("adam", 0.5, 0.999, 0.0)
    assert any("optimizer.param_groups of bias" in line for line in result.lost)


def test_moments_in_bf16() -> None:
    job = taken("    c = base()\n    c.optimizer.implementation = 'fused_opt_states_bf16'\n    return c\n").job
    assert job.precision.moments == "bf16"


def test_what_can_not_be_known_and_counts_is_a_fault_with_its_line() -> None:
    (fault,) = wrong("    c = base()\n    c.training.seq_len = longest()\n    return c\n")
    assert fault.startswith("training.seq_len = longest(...)") and "flag of the command" in fault
    (fault,) = wrong("    c = base()\n    c.training.steps = [n for n in (1, 2)]\n    return c\n")
    assert "mine.py, line 21" in fault and "training.steps" in fault
    assert taken("    c = base()\n    c.training.seq_len = longest()\n    return c\n", "--training.seq_len 64").job
    (fault,) = wrong("    c = base()\n    for n in (1, 2):\n        c.training.steps = n\n    return c\n")
    assert fault.startswith("training.steps = n (mine.py, line 22)")
    (fault,) = wrong("    c = base()\n    if fast():\n        c.training = TrainingConfig()\n    return c\n")
    assert fault.startswith("training = TrainingConfig() (mine.py, line 22)")
    (fault,) = wrong("    c = base()\n    c.parallelism = of_cluster()\n    return c\n")
    assert fault.startswith("parallelism = of_cluster(...)")


def test_what_is_not_followed_is_told() -> None:
    result = taken(
        "    c = base()\n    for n in range(3):\n        c.debug.seed = n\n    tweak(c)\n"
        "    c.metrics.log_freq = often()\n    c.something.new = 4\n    if unknown_here():\n        return None\n"
        "    return c\n"
    )
    answer = " ".join(result.assumed)
    assert "line 21: a statement (for) is not followed" in answer and "line 23: tweak(c) is not followed" in answer
    assert "line 26: if unknown_here() can't be known here" in answer
    assert result.unknown == ("something.new = 4",)
    assert "metrics.log_freq" in result.without_effect["what torchtitan does beside"]


def test_the_environment_is_asked_for() -> None:
    body = "    c = base()\n    c.training.steps = int(os.environ['RUN_STEPS'])\n    return c\n"
    (fault,) = wrong(body)
    assert "--set RUN_STEPS=VALUE" in fault and "training.steps" in fault
    assert taken(body, RUN_STEPS="7").job.optimizer.steps == 7


def test_the_file_of_a_function_that_is_torchtitans_own_is_asked_for() -> None:
    start = START.replace("mine", "llama3").replace("big", "llama3_8b")
    (fault,) = faults("torchtitan", run_sh=start)
    assert "llama3_8b" in fault and "torchtitan/models/llama3/config_registry.py" in fault and "--with" in fault
    own = "from torchtitan.models.llama3.config_registry import llama3_8b\ndef big():\n    c = llama3_8b()\n"
    own += "    c.training.steps = 5\n    return c\n"
    (fault,) = faults("torchtitan", run_sh=START, mine_py=own)
    assert "name torchtitan/models/llama3/config_registry.py too" in fault
    released = "from . import model_registry\n" + HEAD.replace(
        "from torchtitan.models.llama3 import model_registry", ""
    )
    texts = {
        "run_sh": START,
        "mine_py": own,
        "llama3/registry_py": released.replace("def base", "def llama3_8b"),
    }
    result = read("torchtitan", **texts)
    assert (result.job.model.name, result.job.optimizer.steps) == ("llama3-8b", 5)


def test_a_script_of_an_older_release_is_read_with_its_toml() -> None:
    start = "torchrun --nproc_per_node 4 -m torchtitan.train --job.config_file a.toml"
    job = read("torchtitan", run_sh=start, a_toml='[model]\nname = "llama3"\nflavor = "8B"\n').job
    assert (job.model.name, job.plan.dp) == ("llama3-8b", 4)
    (fault,) = faults("torchtitan", run_sh=start)
    assert "a.toml has the options of the program" in fault


def test_a_python_file_alone_names_its_function() -> None:
    body = HEAD + "\ndef big():\n    return base()\n"
    (fault,) = faults("torchtitan", devices=8, mine_py=body)
    assert "base, big" in fault and "--set CONFIG=NAME" in fault
    assert read("torchtitan", "CONFIG=big", devices=8, mine_py=body).job.plan.dp == 8
    asked = Asked(cluster=AskedCluster(8), arguments=("--config", "big", "--training.steps", "7"))
    started = job_of_texts(SOURCES["torchtitan"], {"mine.py": body}, asked, "mine.py").job
    assert (started.plan.dp, started.optimizer.steps) == (8, 7)


HARMFUL = {
    "no Python": "def big(:",
    "itself": "def big():\n    return big()",
    "brackets": "x = " + "(" * 500 + ")" * 500,
    "signs": "def big():\n    return " + "-" * 9000 + "1",
    "points": "def big():\n    return a" + ".a" * 60_000,
    "sums": "def big():\n    return 1" + " + 1" * 60_000,
    "a number": "def big():\n    return 3",
    "a list that doubles": "def big():\n    x = [1]\n" + "    x = x + x\n" * 60 + "    return x",
    "a name twice": "def big():\n    return C(a=1, a=1)",
    "no text": "\x00",
    "too long": "x = 1\n" * 60_000,
    "too many": "def big():\n" + "    x = C(a=[1, 2, 3])\n" * 10_000,
    "a ring": "def big():\n    c = T.Config()\n    c.training = c\n    return c",
    "a tree": "def big():\n    c = T.Config()\n" + "    c = T.Config(a=c, b=c, d=c)\n" * 40 + "    return c",
    "copies": "def big():\n    c = T.Config()\n" + "    c = T.Config(a=deepcopy(c), b=c)\n" * 40 + "    return c",
    "a ring in a list": "def big():\n    c = T.Config(a=[1])\n    c.a[0] = c.a\n    return c if c.a == [1] else c",
    "powers": "def big():\n    return T.Config(training=T(seq_len=9**9**9**9, steps=2**9999))",
}


@pytest.mark.parametrize("name", list(HARMFUL))
def test_python_of_strangers_is_a_fault(name: str) -> None:
    assert faults("torchtitan", run_sh=START, mine_py=HARMFUL[name])


@pytest.mark.parametrize("name", ["torchtitan", "torchtitan-0.2"])
def test_weights_in_bf16_without_masters_go_there_and_back(name: str) -> None:
    job = taken("    c = base()\n    c.training.dtype = 'bfloat16'\n    return c\n").job
    precision = job.precision
    assert (precision.master, precision.gradients, precision.moments) == ("none", "compute", "bf16")
    back = job_of_texts(SYSTEMS[name], exported(SYSTEMS[name], job).files, asked_of(job), "back").job
    assert differences(job, back) == []


@pytest.mark.parametrize(("kind", "reduced"), [("bfloat16", "bf16"), ("float32", "float32")])
def test_gradients_of_weights_in_bfloat16_are_reduced_in_the_type_that_is_said(kind: str, reduced: str) -> None:
    changes = f"    c.training.dtype = 'bfloat16'\n    c.training.mixed_precision_reduce = '{kind}'\n"
    assert taken(f"    c = base()\n{changes}    return c\n").job.precision.reduce_number == reduced


def placed(folder: Path, **files: str) -> Path:
    """The launch script of a folder, beside files by their paths."""
    for name, text in {"run.sh": START.replace("mine", "harbour"), **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "run.sh"


def job_beside(start: Path) -> Imported:
    return read_job_of(SYSTEMS["torchtitan"], (str(start),), Asked(cluster=AskedCluster(device="h100-sxm")))


OF_HARBOUR = "from torchtitan.models.llama3.config_registry import base\ndef big():\n    return base()\n"
OF_TITAN = HEAD.replace("from torchtitan.models.llama3 import", "from . import")


@pytest.mark.parametrize("place", ["harbour", "torchtitan/models/harbour", "src/titan/torchtitan/experiments/harbour"])
def test_the_file_of_a_module_is_found_below_the_script(place: str, tmp_path: Path) -> None:
    """And the file that it imports from, beside another of the same last name."""
    files = {
        f"{place}/config_registry.py": OF_HARBOUR,
        "src/torchtitan/models/llama3/config_registry.py": OF_TITAN,
        "src/torchtitan/models/qwen3/config_registry.py": "def big():\n    return 1\n",
    }
    answer = job_beside(placed(tmp_path, **files))
    assert (answer.job.model.name, answer.job.plan.world) == ("llama3-8b", 16)
    assert sum("config_registry.py is read, which the files name" in note for note in answer.assumed) == 2


def test_of_two_files_of_a_module_none_is_taken(tmp_path: Path) -> None:
    files = {f"{place}/harbour/config_registry.py": OF_HARBOUR for place in ("old", "new")}
    with pytest.raises(PlanError, match="name its file behind the script"):
        job_beside(placed(tmp_path, **files))
    files = {"old/harbour/config_registry.py": OF_HARBOUR, "venv/harbour/config_registry.py": OF_HARBOUR}
    answer = tmp_path / "one"
    files["llama3/config_registry.py"] = OF_TITAN
    assert job_beside(placed(answer, **files)).job.model.name == "llama3-8b"
