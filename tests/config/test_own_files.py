"""A device, a model, a cluster, software and a calibration of one's own: TOML files, no code."""

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardwright.cli.checked_job import load
from shardwright.cli.main import cli
from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.calibration_file import CalibrationSpec
from shardwright.config.catalog_entry import read_entry
from shardwright.config.software import software_of
from shardwright.report.toml_files import write_toml

CHIP = """
memory_gib = 64.0
peak_tflops = { float32 = 50.0, bfloat16 = 400.0 }
memory_gb_per_s = 3000.0
multiprocessors = 100
link_gb_per_s = 200.0
link_domain = 4
generation = "calibrations/mine.toml"
usd_per_hour = 1.5
power_w = 300.0
hours_between_failures = 1000.0
source = "a datasheet"
"""
CLUSTER = """
device = "chip.toml"
software = "software/mine.toml"
devices_per_node = 4
nodes = 2
checkpoint_gb_per_s = 10.0

[intra_node]
bandwidth_gb_per_s = 200.0

[inter_node]
bandwidth_gb_per_s = 25.0
"""
MODEL = """
layers = 8
hidden = 1024
heads = 16
vocab = 32000
sequence = 2048
"""
JOB = """
[model]
name = "own/model.toml"

[cluster]
name = "own/cluster.toml"

[plan]
dp = 4
tp = 2
sequence_parallel = true

[batch]
global_batch_size = 16

[precision]
compute = "bf16"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that names files beside it, which name others beside them."""
    own = tmp_path / "own"
    for folder in ("calibrations", "software"):
        (own / folder).mkdir(parents=True)
    files = {"own/chip": CHIP, "own/cluster": CLUSTER, "own/model": MODEL, "job": JOB}
    files["own/calibrations/mine"] = "product = 0.5"
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)
    catalog = resources.files("shardwright.config.catalog")
    shutil.copy(str(catalog / "software" / "megatron-core.toml"), own / "software" / "mine.toml")
    return tmp_path / "job.toml"


def estimated(job: Path, *overrides: str) -> dict[str, Any]:
    words = [part for override in overrides for part in ("--set", override)]
    done = CliRunner().invoke(cli, ["estimate", str(job), "--json", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_all_is_priced_from_files(job: Path) -> None:
    before = estimated(job)
    assert before["device_memory_bytes"] == 64 * 2**30
    assert (load(str(job), ()).model.name, load(str(job), ()).cluster.name) == ("model", "cluster")
    assert before["cost_per_step"] == pytest.approx(1.5 * 8 * before["step_s"] / 3600)
    assert before["goodput"] is not None and before["gaps"] == []


def test_a_calibration_of_ones_own_counts(job: Path) -> None:
    enough = "plan.microbatch_size=4", "model.sequence=8192"  # with less at once the host's launches set the pace
    slow = estimated(job, *enough)["time"]["compute"]
    better = job.parent / "own" / "calibrations" / "better.toml"
    better.write_text("product = 0.9")
    chip = job.parent / "own" / "chip2.toml"
    chip.write_text(CHIP.replace("mine.toml", "better.toml"))
    fast = estimated(job, *enough, f"cluster.device={chip}")["time"]["compute"]
    assert 0.5 < fast / slow < 0.8
    # Constants that the file leaves out are common to all.
    better.rename(job.parent / "own" / "calibrations" / "empty.toml").write_text("")
    chip3 = job.parent / "own" / "chip3.toml"
    chip3.write_text(CHIP.replace("mine.toml", "empty.toml"))
    common = estimated(job, *enough, f"cluster.device={chip3}")["time"]["compute"]
    assert fast < common < slow


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("own/chip", CHIP.replace("memory_gib = 64.0", ""), "memory_gib is missing; set it"),
        ("own/chip", CHIP + "bandwidth = 3", "bandwidth is not a known field; "),
        (
            "own/chip",
            CHIP.replace("power_w = 300.0", 'power_w = "300"'),
            'power_w = "300": it should be a valid number',
        ),
        ("own/chip", "memory_gib = ", "is not valid TOML"),
        ("own/chip", None, "can't be read: No such file"),
        ("own/model", None, "model.name: "),
        ("own/model", "hidden = 0", "model.hidden = 0: it should be greater than 0"),
        ("own/cluster", 'device = "no.toml"', "cluster.device "),
        ("own/software/mine", "", "source is missing"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(job: Path, file: str, text: str | None, fault: str) -> None:
    path = job.parent / f"{file}.toml"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(PlanError) as refusal:
        load(str(job), ())
    assert any(fault in line for line in refusal.value.faults), refusal.value.faults


def test_a_path_on_the_command_line_is_found_from_here(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent / "own")
    assert load("quickstart", ("model.name=model.toml",)).model.hidden == 1024


def test_a_calibration_is_checked(job: Path) -> None:
    """A wrong constant is refused by its name; none makes a step that takes no time, or ends before it began."""
    (job.parent / "own" / "calibrations" / "mine.toml").write_text("product = -1\nhigh = false\nproducct = 0.4\n")
    estimated = CliRunner().invoke(cli, ["estimate", str(job)])
    assert isinstance(estimated.exception, PlanError)
    faults = "\n".join(estimated.exception.faults)
    assert "product = -1: it should be greater than or equal to 0.000001" in faults
    assert "high = false: it should be a valid number" in faults
    assert "producct is not a known field; did you mean product" in faults


@pytest.mark.parametrize(
    ("constants", "fault"),
    [
        ("product = 1.2", "product = 1.2: it should be less than or equal to 1 (Share of its peak that a large"),
        ("memory = 1.5", "memory = 1.5: it should be less than or equal to 1 (Share of the memory's bandwidth"),
        ("product = 0.9\nrate = 1.2", "product 0.9 x rate 1.2 = 1.08 of the peak of "),
        (
            "attention_cudnn = 0.8\nattention_backward = 1.5",
            "attention_cudnn 0.8 x attention_backward 1.5 = 1.2 of the peak of ",
        ),
    ],
)
def test_nothing_is_faster_than_its_peak(job: Path, constants: str, fault: str) -> None:
    """No step is priced with more FLOP/s than devices have, which would print an MFU above 1."""
    (job.parent / "own" / "calibrations" / "mine.toml").write_text(constants)
    software = job.parent / "own" / "software" / "mine.toml"
    software.write_text(f'calibration = "../calibrations/mine.toml"\n{software.read_text()}')
    answer = CliRunner().invoke(cli, ["estimate", str(job)])
    refused = "\n".join(answer.exception.faults) if isinstance(answer.exception, PlanError) else ""
    assert fault in " ".join((answer.output + refused).split())
    assert "MFU" not in answer.output


def test_the_catalog_has_no_other_constants() -> None:
    for name in catalog.names("calibrations"):
        if name != "pessimistic":
            read_entry("calibrations", name, CalibrationSpec)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("bfloat16 = 400.0", "bf16 = 400.0", "'bf16' is none; did you mean bfloat16?"),
        ("bfloat16 = 400.0", "bflaot = 400.0", "use float32, bfloat16, float16, float8, float4"),
        ('"calibrations/mine.toml"', '"hoper"', "'hoper' is not in the catalog of calibrations; did you mean hopper"),
    ],
)
def test_a_device_names_what_there_is(job: Path, old: str, new: str, fault: str) -> None:
    """A peak of another name would never be read, and an unknown generation has no efficiencies."""
    device = job.parent / "own" / "chip.toml"
    device.write_text(device.read_text().replace(old, new))
    with pytest.raises(PlanError) as caught:
        load(str(job), ())
    assert fault in " ".join(caught.value.faults)


def test_all_that_a_device_lacks_is_told_at_once(job: Path) -> None:
    device = job.parent / "own" / "chip.toml"
    lines = device.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("memory_gb_per_s", "multiprocessors"))]
    device.write_text("\n".join(kept))
    run = CliRunner().invoke(cli, ["estimate", str(job)])
    answer = " ".join(f"{run.output} {run.exception}".split())
    assert "has no known memory_gb_per_s and no multiprocessors; add them to its file" in answer


# Of few plans the best is soon found.
FEW = [word for kept in ("tp=1", "pp=1", "cp=1", "recompute=none") for word in ("--keep", f"plan.{kept}")]


def test_a_name_that_would_change_nothing_is_refused(job: Path, tmp_path: Path) -> None:
    """A job that a search wrote has all fields of its model: another name alone would be a label."""
    written = tmp_path / "written.toml"
    options = ["plan", "tiny-llama", "--devices", "8", "--device", "h100-sxm", *FEW]
    assert CliRunner().invoke(cli, [*options, "--toml", str(written)], catch_exceptions=False).exit_code == 0
    for override, owned in (("model.name=llama3-70b", "model.layers"), ("cluster.name=jean-zay", "cluster.device")):
        with pytest.raises(PlanError, match=f"the job has {owned}") as caught:
            load(str(written), (override,))
        assert "set them too, or name another job" in str(caught.value)
    assert load(str(written), ("model.name=mine",)).model.name == "mine"


def test_a_written_job_finds_its_files_from_everywhere(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(job.parent)
    options = ["plan", "tiny-llama", "--devices", "4", "--device", "own/chip.toml", *FEW]
    done = CliRunner().invoke(cli, [*options, "--toml", "elsewhere/best.toml"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    monkeypatch.chdir("/")
    assert load(str(tmp_path / "elsewhere" / "best.toml"), ()).cluster.device == str(tmp_path / "own" / "chip.toml")


def test_scale_refuses_a_plan_that_it_would_not_keep() -> None:
    for override in ("plan.tp=2", "plan={ tp = 2 }", "plan.tp = 2"):
        options = ["scale", "llama3-8b", "--device", "h100-sxm", "--devices", "8", "--set", override]
        run = CliRunner().invoke(cli, options)
        assert isinstance(run.exception, PlanError) and "say --keep" in str(run.exception)


def test_text_beside_the_working_directory_is_found_from_a_written_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "elsewhere").mkdir()
    write_toml(Path("elsewhere/job.toml"), load("quickstart", ("data.path=text.txt",)))
    written = load("elsewhere/job.toml", ())
    assert written.data.path == str(tmp_path / "text.txt") and written.data.tokenizer == "bytes"


def test_a_cluster_of_ones_choice_has_as_many_devices_as_are_asked_for() -> None:
    options = ["estimate", "quickstart", "--set", "cluster.name=jean-zay", "--devices", "16", "--json"]
    done = CliRunner().invoke(cli, [*options, "--set", "plan.dp=4"], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_a_model_by_a_path_that_is_not_there_says_so() -> None:
    with pytest.raises(PlanError, match="there is no such file or folder"):
        load("quickstart", ('model={ name = "./nowhere" }',))


@pytest.mark.parametrize("field", ["reserved_gib", "headroom_gib"])
def test_a_device_of_which_nothing_is_left_is_refused(job: Path, field: str) -> None:
    chip = job.parent / "own" / "chip.toml"
    chip.write_text(f"{field} = 64.0\n" + chip.read_text())
    with pytest.raises(PlanError, match=rf"{field} = 64.0.*64 GiB of 64 GiB leave nothing for a plan"):
        load(str(job), ())


def test_software_is_like_other_software_where_it_says_nothing_else(job: Path) -> None:
    """By a name of the catalog and by a file beside it, each with one fact of its own."""
    folder = job.parent / "own" / "software"
    (folder / "mine.toml").write_text('source = "a fork"\nlike = "base.toml"\nkernels = [10.0, 20.0]\n')
    (folder / "base.toml").write_text('source = "another"\nframeworks = ["other"]\nlike = "nemo"\nmasters = false\n')
    result, nemo = software_of(str(folder / "mine.toml")), software_of("nemo")
    assert (result.source, result.frameworks, result.kernels, result.masters) == ("a fork", (), (10.0, 20.0), False)
    own = {"name", "title", "source", "like", "frameworks", "since", "kernels", "masters", "usual"}
    assert result.model_dump(exclude=own) == nemo.model_dump(exclude=own)
    assert estimated(job)["step_s"] > 0
    (folder / "base.toml").write_text('source = "another"\nlike = "shardwright"\n')
    assert not software_of(str(folder / "mine.toml")).is_own


@pytest.mark.parametrize(
    ("base", "fault"),
    [
        ('like = "nemoo"', "like: 'nemoo' is not in the catalog of software; did you mean nemo?"),
        ('like = "mine.toml"', "like: mine is like base is like mine; let one of them stand by itself"),
    ],
)
def test_software_like_what_it_cannot_be_like(job: Path, base: str, fault: str) -> None:
    folder = job.parent / "own" / "software"
    (folder / "mine.toml").write_text('source = "a fork"\nlike = "base.toml"\n')
    (folder / "base.toml").write_text(f'source = "another"\n{base}\n')
    with pytest.raises(PlanError) as refusal:
        load(str(job), ())
    assert any(fault in line for line in refusal.value.faults), refusal.value.faults
