"""A slice of the fuzzer of what strangers send, and that it sees a load that is not what was saved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import inputs, mutations, strangers
from fuzz.hostile import TEXT, Case
from fuzz.hostile_checkpoints import RESUME, job_fields, whole_folders
from fuzz.kinds import case_of
from support.ranks import PATIENCE_S

FUZZER = Path(strangers.__file__)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "count"), [("job", 15), ("checkpoint", 6), ("data", 8), ("model", 10), ("foreign", 15), ("growth", 20)]
)
def test_some_of_what_strangers_send(kind: str, count: int, tmp_path: Path) -> None:
    command = [sys.executable, str(FUZZER), "--kind", kind, "--seed", "17", "--count", str(count)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} cases" in done.stdout


def test_a_case_is_a_function_of_seed_and_number() -> None:
    assert case_of(3, 7, ["checkpoint"]) == case_of(3, 7, ["checkpoint"])
    assert {case_of(3, number, ["checkpoint"]).kind for number in range(20)} == {"damaged", "signed"}


def test_a_load_of_other_values_is_seen(tmp_path: Path) -> None:
    """Two whole checkpoints, of which it is said that something else was saved."""
    case = Case("damaged", [RESUME, "job.toml"])
    for name, contents in whole_folders()[0].items():
        case.put(name, contents)
    expected = json.loads(whole_folders()[0]["expected.json"])
    case.put("job.toml", mutations.toml(job_fields(0))).put("text.txt", TEXT)
    for wrong in ({}, {"2": expected["1"]}):
        case.put("expected.json", json.dumps(expected | wrong | {"signed": False}))
        file = tmp_path / "case.json"
        file.write_text(case.as_json())
        command = [sys.executable, inputs.__file__, "--case", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == bool(wrong), done.stdout + done.stderr
        assert ("what was loaded of step 2 was not saved" in done.stdout) == bool(wrong)
