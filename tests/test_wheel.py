"""The wheel has everything in it: installed alone, with no source tree in sight, it predicts, draws and trains."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from email import message_from_string
from math import prod
from pathlib import Path

import pytest

from support.ranks import PATIENCE_S

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardwright"

# Reads every entry of the catalog, predicts every job, finds a plan and draws a page, from what is installed.
READS = """
import sys
from pathlib import Path
import shardwright
from shardwright.cli.checked_job import load
from shardwright.cli.main import cli
from shardwright.config import catalog
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.load import make_job
from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import shipped
from shardwright.planner.own_plan import estimate
from shardwright.report.estimate_text import estimate_dict

assert Path(shardwright.__file__).is_relative_to(sys.argv[1]), shardwright.__file__
for kind, spec in (("devices", DeviceSpec), ("software", SoftwareSpec)):
    for name in catalog.names(kind):
        read_entry(kind, name, spec)
for name in catalog.names("clusters"):
    ClusterSpec.model_validate(catalog.read("clusters", name))
for name in catalog.names("models"):
    make_job({"model": {"name": name} | catalog.read("models", name)})
assert {name.partition(".")[0] for name in shipped()} == set(catalog.names("calibrations"))
assert catalog.read_left_out() and catalog.read_confidence()
for name in catalog.names("jobs"):
    job = load(name, ())
    if job.cluster.device == "unknown":
        assert estimate_dict(job)["memory"], name
    else:
        assert estimate(job).step.total > 0, name
few = [word for kept in ("pp=1", "cp=1", "microbatch_size=1", "recompute=full") for word in ("--keep", f"plan.{kept}")]
asked = ["llama3-8b", "--devices", "8", "--device", "h100-sxm", *few, "--top", "1", "--json"]
cli(["plan", *asked], standalone_mode=False)
cli(["simulate", "quickstart", "--html", sys.argv[2]], standalone_mode=False)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed into, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"  # setuptools writes beside what it builds
    shutil.copytree(SOURCE, tree / "src" / "shardwright", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    wheel = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder), str(tree)]
    subprocess.run(wheel, check=True, timeout=PATIENCE_S)
    (built,) = folder.glob("*.whl")
    site = folder / "site"
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(site), str(built)],
        check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    shutil.rmtree(tree)
    return site


def run(site: Path, *words: str) -> str:
    """A Python that sees the wheel and the packages of the tests, and not the tree: -S leaves out what an installation
    for development adds."""
    packages = sysconfig.get_paths()["purelib"]
    environment = os.environ | {"PYTHONPATH": f"{site}:{packages}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=site, env=environment, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_of(folder: Path) -> set[Path]:
    results = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path for path in results if "__pycache__" not in path.parts}


def test_every_file_of_the_package_is_in_it(installed: Path) -> None:
    assert files_of(installed / "shardwright") == files_of(SOURCE)
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"bin", "shardwright"}
    assert (installed / "bin" / "shardwright").exists()


def test_it_says_what_it_is(installed: Path) -> None:
    (info,) = installed.glob("shardwright-*.dist-info")
    result = message_from_string((info / "METADATA").read_text(encoding="utf-8"))
    assert (result["Name"], result["License-Expression"], result["License-File"]) == (
        "shardwright", "Apache-2.0", "LICENSE",
    )  # fmt: skip
    assert (info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert result["Description-Content-Type"] == "text/markdown"
    assert result.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert result["Requires-Python"] and result["Summary"] and result["Keywords"]
    assert "Typing :: Typed" in result.get_all("Classifier", []) and (installed / "shardwright" / "py.typed").exists()
    assert result.get_all("Project-URL") is None


def test_it_reads_its_catalog_plans_draws_and_trains(installed: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    (plans,) = (
        line for line in run(installed, "-c", READS, str(installed), str(page)).splitlines() if line[:2] == "[{"
    )
    best = json.loads(plans)[0]["plan"]
    assert prod(best[axis] for axis in ("dp", "cp", "tp", "pp")) == 8
    assert "<style>" in page.read_text() and "<script>" in page.read_text()
    small = ("plan.dp=1", "plan.tp=1", "plan.pp=1", "plan.sequence_parallel=false", "model.layers=1", "model.hidden=32",
             "model.ffn=64", "model.sequence=32", "batch.global_batch_size=4", "optimizer.steps=2",
             "optimizer.warmup_steps=1", "run.eval_batches=1", "run.sample_tokens=4", "run.log_every=1")  # fmt: skip
    overrides = [part for override in (*small, f"run.folder={tmp_path}/run") for part in ("--set", override)]
    assert "step 2/2" in run(installed, "-m", "shardwright", "train", "quickstart", *overrides)
