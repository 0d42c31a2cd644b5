"""The bytes that a run is said to have moved in a step are those that were predicted, under every schedule."""

from pathlib import Path
from typing import Any

import pytest

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.report.run_comparison import compared_dict
from shardwright.train.trainer import train
from support.cases import small_job
from support.ranks import run_on_mesh

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "drained": ({"dp": 2, "zero": 1}, {}),
    "weight versions": ({"dp": 2, "pp": 2, "schedule": "pipedream"}, {}),
    "two versions": ({"pp": 2, "schedule": "pipedream-2bw", "batch": 8}, {}),
    "weights apart": ({"pp": 2, "schedule": "zb-v", "tp": 2, "sequence_parallel": True}, {}),
    "both directions": ({"pp": 2, "schedule": "dualpipe", "batch": 8}, {}),
    "sharded": ({"dp": 2, "zero": 3, "tp": 2}, {"precision": {"compute": "bf16", "float8": "delayed"}}),
    "growing": ({"dp": 2}, {"batch": {"ramp": {"start": 2, "increment": 2, "samples": 8}}}),
    "further tokens": ({"pp": 2}, {"model": {"mtp_layers": 1}}),
    "documents": ({"dp": 2, "cp": 2}, {"data": {"separate_documents": True}}),
    "saved": ({"dp": 2, "zero": 2}, {"checkpoint": {"every_steps": 1}}),
    "by matrix": ({"dp": 2, "zero": 1}, {"optimizer": {"name": "muon"}}),
}


def job_on_text(folder: Path, plan: dict[str, Any], more: dict[str, Any]) -> JobSpec:
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 60)
    fields = small_job("llama", **({"batch": 4} | plan | {"layers": 4})).model_dump()
    fields["model"]["vocab"] = 256
    fields["data"]["path"] = str(folder / "text.txt")
    fields["optimizer"] |= {"steps": 5, "clip_grad_norm": 0.0 if "pipedream" in plan.get("schedule", "") else 1.0}
    fields["run"] |= {"eval_batches": 1, "log_every": 2, "eval_every": 4}
    for section, changed in more.items():
        fields[section] |= changed
    return make_job(fields)


def compared(mesh: Mesh, job: JobSpec, folder: Path) -> dict[str, Any] | None:
    """Of rank 0, what its run ends with."""
    measured = train(job, mesh, folder).measured
    assert measured is not None
    return compared_dict(job, measured) if mesh.rank == 0 else None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RUNS)
def test_predicted_bytes_are_measured(name: str, tmp_path: Path) -> None:
    job = job_on_text(tmp_path, *RUNS[name])
    result = run_on_mesh(job, compared, job, tmp_path)[0]
    assert result is not None
    moved = result["axis_bytes"]
    assert moved and any(measured for _, measured in moved.values())
    for axis, (predicted, measured) in moved.items():
        assert predicted == measured, (axis, moved)
    if job.plan.pp > 1:
        assert moved["pp"][0] > 0
