"""The Python API says what the commands say, without torch, and its notebook and its document run."""

import doctest
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import shardwright as sw
from shardwright.cli.main import cli

pytestmark = pytest.mark.usefixtures("searched_once")

ROOT = Path(__file__).parents[2]
KEPT = ["plan.tp=2", "plan.pp=1", "plan.microbatch_size=1"]  # of few plans the best is soon found
ON_8 = {"devices": 8, "device": "h100-sxm"}
WITHOUT_TORCH = """
import sys
import shardwright as sw
job = sw.load("tiny-llama", "plan.tp=2", devices=8, device="h100-sxm")
str(job.estimate()), job.plan(keep=["plan.tp=2", "plan.pp=1", "plan.microbatch_size=1"]).rows()
sw.load("quickstart").simulate().rows()
assert not {"torch", "pandas"} & set(sys.modules), "torch or pandas was imported"
"""


def printed(*words: str) -> str:
    done = CliRunner().invoke(cli, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_doctests() -> None:
    """Examples in docstrings, wherever there are some."""
    files = [file for file in (ROOT / "src" / "shardwright").rglob("*.py") if ">>> " in file.read_text("utf-8")]
    assert len(files) >= 2
    for file in files:
        name = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
        result = doctest.testmod(importlib.import_module(name))
        assert result.attempted and not result.failed, name


def test_results_print_and_dump_as_the_commands_do() -> None:
    sets = ["plan.zero=1", *KEPT]
    words = [
        "tiny-llama",
        "--devices",
        "8",
        "--device",
        "h100-sxm",
        *(word for field in sets for word in ("--set", field)),
    ]
    job = sw.load("tiny-llama", *sets, **ON_8)
    assert printed("estimate", *words).endswith(f"{job.estimate()}\n")
    assert json.loads(printed("estimate", *words, "--json")) == job.estimate().to_dict()
    assert printed("simulate", "quickstart", "--no-colour") == f"{sw.load('quickstart').simulate()}\n"
    assert printed("explain", *words).endswith(f"{job.explain()}\n")
    assert json.loads(printed("explain", *words, "--json")) == json.loads(json.dumps(job.explain().to_dict()))
    search = [word for kept in KEPT for word in ("--keep", kept)] + ["--top", "3"]
    curves = sw.load("tiny-llama", **ON_8).scale("8-16", keep=KEPT)
    sizes = ["tiny-llama", "--device", "h100-sxm", *search[:-2], "--devices"]
    assert json.loads(printed("scale", *sizes, "8,16", "--json")) == json.loads(json.dumps(curves.to_dict()))
    smallest = sw.load("tiny-llama", **ON_8).scale([8], keep=KEPT).rows()
    assert [row["step_s"] for row in smallest] == [row["step_s"] for row in curves.rows() if row["devices"] == 8]
    result = job.plan(keep=KEPT, top=3)
    assert json.loads(printed("plan", *words, *search, "--json")) == result.dicts()
    heading, best, *_ = str(result).split("\n\n")
    assert "plans searched" in heading  # for how long, which differs
    assert best.startswith("Recommended: tp 2, pp 1") and best in printed("plan", *words, *search)


def test_a_recommended_plan_is_a_job() -> None:
    job = sw.load("tiny-llama", **ON_8).plan(keep=KEPT).recommended
    assert (job.spec.plan.tp, job.spec.plan.world) == (2, 8)
    moved = job.with_(plan={"tp": 1, "dp": 8, "microbatch_size": 1})
    assert moved.spec.plan.degrees == "dp 8 x tp 1 x pp 1" and job.spec.plan.tp == 2
    assert sw.load(job.job).spec == job.spec


def test_fields_files_and_folders_are_read(tmp_path: Path) -> None:
    sw.load("quickstart", "plan.tp=1").save(tmp_path / "job.toml")
    job = sw.load(tmp_path / "job.toml", model={"layers": 6})
    assert (job.spec.plan.tp, job.spec.model.layers) == (1, 6)
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
              "num_hidden_layers": 2, "vocab_size": 256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sw.load(tmp_path, **ON_8).spec.model.hidden == 64
    fields = {"model": {"name": "tiny-llama"}, "plan": {"dp": 2}, "batch": {"global_batch_size": 4}}
    assert sw.load(fields).estimate().rows()[0]["pp_rank"] == 0
    assert fields["model"] == {"name": "tiny-llama"}


def test_every_fault_is_told() -> None:
    with pytest.raises(sw.PlanError, match="2 faults"):
        sw.load("quickstart", optimizer={"stepz": 1}, model={"heads": "many"})
    with pytest.raises(sw.PlanError) as of_plan:
        sw.load("quickstart", "plan.tp=3").estimate()
    assert "plan.tp 3 does not divide 4 kv heads (4 / 3 = 1.33); use 1, 2 or 4" in of_plan.value.faults
    for nonsense in (None, 3, ["quickstart"], b"quickstart"):
        with pytest.raises(sw.PlanError, match="is no job; give a path"):
            sw.load(nonsense)  # type: ignore[arg-type]
    with pytest.raises(sw.PlanError, match="devices is '8'; use a whole number"):
        sw.load("tiny-llama", devices="8")  # type: ignore[arg-type]
    with pytest.raises(sw.PlanError, match="3 is no field with a value"):
        sw.load("quickstart").set(3)  # type: ignore[arg-type]
    with pytest.raises(sw.PlanError, match="a section is a dictionary"):
        sw.load("quickstart", plan="tp=2")  # type: ignore[arg-type]
    with pytest.raises(sw.PlanError, match="is a model, and a job is a model on a cluster"):
        sw.load("llama3-8b")
    with pytest.raises(sw.PlanError, match="use time, goodput, cost"):
        sw.load("tiny-llama", **ON_8).plan(objective="joy")


@pytest.mark.parametrize("name", ["plan", "estimate", "compare", "toml"])
def test_what_a_job_has_is_told_of_the_package(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; a job has it: shardwright.load.*[.]{name}[(]"):
        getattr(sw, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}n'$"):
        getattr(sw, f"{name}n")


def test_a_package_that_is_called_tells_the_call_of_a_job() -> None:
    packages = {module.name for module in pkgutil.iter_modules(sw.__path__)}
    both = [name for name in dir(sw.Job) if name in packages]
    assert {"train", "explain"} <= set(both)
    for name in both:
        package = importlib.import_module(f"shardwright.{name}")
        with pytest.raises(TypeError, match=rf"not a function; .* shardwright.load[(]'quickstart'[)][.]{name}[(]"):
            package("quickstart", steps=3)  # type: ignore[operator]
        with pytest.raises(
            TypeError, match=rf'shardwright.load[(]"llama3-8b", devices=64, device="h100-sxm"[)][.]{name}[(]'
        ):
            package()  # type: ignore[operator]


def test_a_field_or_a_number_of_gpus_that_is_no_section_is_told_where_it_belongs() -> None:
    for wrong, meant in (
        ({"tp": 4}, "plan={'tp': 4}"), ({"gpus": 8}, "devices=8"), ({"gpu": "h100"}, "device='h100'"),
        ({"steps": 3}, "optimizer={'steps': 3}"), ({"global_batch_size": 64}, "batch={'global_batch_size': 64}"),
    ):  # fmt: skip
        with pytest.raises(sw.PlanError) as refused:
            sw.load("quickstart", **wrong)  # type: ignore[arg-type]
        assert f"did you mean {meant}?" in str(refused.value) or f" or {meant}?" in str(refused.value), wrong


def test_a_command_that_a_job_does_not_have_is_told_the_way() -> None:
    job = sw.load("quickstart")
    with pytest.raises(AttributeError, match=r"no attribute 'verify'; a job has .*estimate, .*save\('job.toml'\)"):
        job.verify()
    assert not hasattr(job, "__unknown__") and {"estimate", "plan"} <= set(dir(job))
    assert set(sw.__all__) <= set(dir(sw)) and not {"Any", "import_module"} & set(dir(sw))


def test_a_job_that_cannot_be_saved_is_told_by_the_call(tmp_path: Path) -> None:
    with pytest.raises(sw.PlanError, match=r"save .*nowhere/job.toml can.t be written"):
        sw.load("quickstart").save(tmp_path / "nowhere" / "job.toml")


def test_numbers_of_numpy_and_paths_are_plain_values(tmp_path: Path) -> None:
    eight = np.int64(8)
    job = sw.load("tiny-llama", devices=eight, device="h100-sxm")
    assert job.spec.cluster.num_devices == 8
    answer = sw.load(
        "quickstart", optimizer={"steps": np.int64(3), "learning_rate": np.float32(0.5)},
        run={"folder": tmp_path / "x"}, plan={"layout": (np.int32(2), 2), "pp": 2},
    ).spec  # fmt: skip
    assert (answer.optimizer.steps, answer.optimizer.learning_rate, answer.run.folder) == (3, 0.5, str(tmp_path / "x"))
    assert answer.plan.layout == [2, 2]
    fields = {
        "model": {"name": "tiny-llama", "layers": np.int64(2)},
        "plan": {"dp": np.array(2)},
        "run": {"folder": tmp_path},
    }
    of = sw.load(fields | {"batch": {"global_batch_size": np.int16(4)}}).spec
    assert (of.model.layers, of.plan.dp, of.run.folder) == (2, 2, str(tmp_path))
    asked = {"top": np.int64(1), "tokens": np.float64(1e9)}
    assert job.plan(keep=KEPT, **asked).rows() == job.plan(keep=KEPT, top=1, tokens=1e9).rows()
    assert sw.load("quickstart").simulate(steps=np.int64(2)).to_dict()


NONSENSE: dict[str, tuple[Any, str]] = {
    "device": (lambda: sw.load("tiny-llama", device=5), "device is 5; use a text, such as 'h100-sxm'"),
    "software": (lambda: sw.load("tiny-llama", software=5), "software is 5; use a text"),
    "devices": (lambda: sw.load("tiny-llama", devices=-8), "devices is -8; use a whole number, 0 or more"),
    "truth": (lambda: sw.load("tiny-llama", devices=True), "devices is True; use a whole number"),
    "field": (lambda: sw.load("quickstart", run={"folder": object()}), "run.folder is <object.*use a text"),
    "fields": (lambda: sw.load({"plan": {"layout": [1, {2}]}}), r"plan.layout\[1\] is \{2\}; use a text"),
    "float8": (lambda: few(float8="x"), "float8 'x' is none; use none, delayed"),
    "top": (lambda: few(top=2.5), "top, how many plans are shown, is 2.5; use a whole number, 1 or more"),
    "tokens": (lambda: few(tokens="many"), "tokens is 'many'; use a number, such as 1e\\+12"),
    "keep": (lambda: few(keep=[3]), r"keep is \[3\]; use texts, such as \['plan.tp=2'\]"),
    "between": (lambda: few(between=5), "between is 5; use texts"),
    "steps": (lambda: sw.load("quickstart").simulate(steps="2"), "steps is '2'; use a whole number, 1 or more"),
    "message": (lambda: sw.load("quickstart").simulate(communication=None), "communication is None; use a number"),
    "weights": (lambda: sw.load("quickstart").train(weights_from=5), "weights_from is 5; use a text"),
    "save": (lambda: sw.load("quickstart").save(5), "path is 5; use a text, such as 'job.toml'"),
    "picture": (lambda: sw.load("quickstart").simulate().save("x.png"), "x.png is no page.*use .html for the page"),
}


def few(**options: Any) -> Any:
    return sw.load("tiny-llama", **ON_8).plan(**{"keep": KEPT, **options})


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_has_a_way_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, text = NONSENSE[name]
    with pytest.raises(sw.PlanError, match=text):
        call()
    assert not list(tmp_path.iterdir())


def test_what_a_timeline_is_saved_as_is_said_by_its_ending(tmp_path: Path) -> None:
    result = sw.load("quickstart").simulate()
    for ending, begins in ((".HTML", "<!doctype html>"), (".svg", "<svg"), (".json", "{")):
        result.save(tmp_path / f"a{ending}")
        assert (tmp_path / f"a{ending}").read_text("utf-8").startswith(begins)


def test_predicting_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are what pandas is given; without it the error says what to install."""
    result = sw.load("quickstart").simulate()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(sw.RunError, match="pip install pandas"):
        result.frame()
    stand_in: Any = ModuleType("pandas")
    stand_in.DataFrame = list
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    assert list(result.frame()) == result.rows()
    computed = [row for row in result.rows() if row["on"] == "compute" and row["rank"] == 0]
    assert [row["action"] for row in computed].count("F") == 4
    assert "<svg" in result._repr_html_() and "<html" in result.html()


def run_cells(cells: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run cells in order, in one namespace, as a notebook does."""
    monkeypatch.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells:
        exec(cell, namespace)
    return namespace


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells of code are run in order, in this process: the libraries that run notebooks are no dependency."""
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text("utf-8"))["cells"]
    result = run_cells(
        ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"], tmp_path, monkeypatch
    )
    assert result["run"].steps == 3 and result["run"].last_loss < result["run"].first_loss
    assert (tmp_path / "timeline.html").exists()


@pytest.mark.parametrize("document", ["python", "own-modules"])
def test_the_document_runs(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / f"{document}.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    run_cells(blocks, tmp_path, monkeypatch)
