"""A run that stopped and goes on is the run that never stopped: bit for bit, or to rounding under another plan."""

import errno
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shardwright.config.base import PlanError
from shardwright.config.checkpoint import CheckpointSpec
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.train.checkpoint.boxes import HeldBox
from shardwright.train.checkpoint.kept import check_whole, remove_old, remove_unfinished_checkpoints, steps_kept
from shardwright.train.checkpoint.manifest import BrokenCheckpointError
from shardwright.train.checkpoint.resuming import UnreadCheckpointError
from shardwright.train.checkpoint.storage import LocalStorage, open_storage
from support.cases import small_job
from support.going_on import (
    STEPS,
    Boxes,
    began_anew,
    go_on,
    go_on_and_hold,
    go_on_and_tell,
    refusal,
    save_and_go_on,
    save_and_load_in_memory,
    save_and_tell,
)
from support.ranks import run_on_mesh


def job_with(kind: str = "llama", sections: dict[str, Any] | None = None, **plan: Any) -> JobSpec:
    job = small_job(kind, **plan)
    if not sections:
        return job
    fields = job.model_dump(mode="json", exclude_unset=True)
    for section, values in sections.items():
        fields[section] = fields.get(section, {}) | values
    return make_job(fields)


BATCH = 24
BF16_MOMENTS = {"precision": {"moments": "bf16"}}
NO_MASTERS = {"precision": {"compute": "bf16", "gradients": "compute", "moments": "bf16", "master": "none"}}
FP16 = {"precision": {"compute": "fp16"}}
ALIKE = {
    "zero 2, interleaved": job_with(dp=2, pp=2, zero=2, schedule="interleaved-1f1b", virtual_stages=2),
    "zero 3": job_with(dp=4, zero=3),
    "hybrid": job_with(dp=4, zero=3, zero_ranks=2),
    "tp, sequence parallel": job_with("gpt-tied", tp=2, pp=2, sequence_parallel=True),
    "cp": job_with(cp=2, dp=2, zero=1),
    "experts with a bias": job_with("deepseek", dp=2, ep=2),
    "correlation": job_with("correlation", dp=2, ep=2, zero=1),
    "fp8, delayed": job_with(dp=2, sections={"precision": {"compute": "bf16", "float8": "delayed"}}),
    "fp8 experts, delayed": job_with(
        "mixtral", dp=2, ep=2, sections={"precision": {"compute": "bf16", "float8": "delayed"}}
    ),
    "fp16": job_with(dp=2, zero=1, sections=FP16),
    "PowerSGD": job_with(dp=2, compress="powersgd", compress_rank=2, compress_least=1),
    "top-k": job_with(dp=2, zero=1, compress="topk", compress_share=0.1, compress_least=1),
    "int8": job_with(dp=2, compress="int8", compress_least=1),
    "offload": job_with(dp=2, zero=1, offload_optimizer=0.5),
    "bf16 moments, half on the host": job_with(dp=2, zero=1, offload_optimizer=0.5, sections=BF16_MOMENTS),
    "no masters": job_with(dp=2, zero=2, sections=NO_MASTERS),
    "adapters": job_with(dp=2, zero=3, sections={"model": {"adapter": {"rank": 4, "alpha": 8.0}}}),
    "dualpipe": job_with("llama-tied", pp=2, schedule="dualpipe", layers=4),
    "zb-v": job_with(pp=2, schedule="zb-v", layers=4),
    "pipedream": job_with(pp=2, schedule="pipedream", sections={"optimizer": {"clip_grad_norm": 0.0}}),
    "pipedream-2bw": job_with(pp=2, dp=2, schedule="pipedream-2bw", sections={"optimizer": {"clip_grad_norm": 0.0}}),
}


@pytest.mark.sampled(6)
@pytest.mark.processes
@pytest.mark.parametrize("name", ALIKE)
def test_going_on_under_the_same_plan_is_bitwise_never_having_stopped(name: str, tmp_path: Path) -> None:
    job = ALIKE[name]
    never_stopped = run_on_mesh(job, save_and_go_on, job, tmp_path)
    went_on = run_on_mesh(job, go_on, job, tmp_path)
    for (losses, boxes), (losses_again, boxes_again) in zip(never_stopped, went_on, strict=True):
        assert losses == losses_again
        assert boxes.keys() == boxes_again.keys()
        different = [name for name, values in boxes.items() if not torch.equal(values, boxes_again[name])]
        assert different == []


def llama(layers: int = 4, sections: dict[str, Any] | None = None, **plan: Any) -> JobSpec:
    """Of some microbatches each: more of them would only be more messages."""
    size = max(1, BATCH // (4 * plan.get("dp", 1)))
    return job_with("llama", sections, layers=layers, batch=BATCH, microbatch_size=size, **plan)


def powersgd(**plan: Any) -> JobSpec:
    return llama(2, compress="powersgd", compress_rank=2, compress_least=1, **plan)


DENSE = {
    "one": llama(),
    "dp 3": llama(dp=3),
    "dp 3, zero 2": llama(dp=3, zero=2),
    "dp 4, zero 3": llama(dp=4, zero=3),
    "dp 8, zero 3": llama(dp=8, zero=3),
    "dp 8, hybrid": llama(dp=8, zero=3, zero_ranks=2),
    "dp 2, zero 1, half on the host": llama(dp=2, zero=1, offload_optimizer=0.5),
    "tp 4 x pp 2": llama(tp=4, pp=2),
    "tp 2 x pp 2, sequence parallel": llama(tp=2, pp=2, sequence_parallel=True),
    "tp 2 x dp 2, other order": llama(tp=2, dp=2, zero=2, order="dp-tp"),
    "pp 2, uneven": llama(pp=2, layout=[1, 3]),
    "pp 2, gpipe, recomputing": llama(pp=2, schedule="gpipe", recompute="full"),
    "pp 2 of 4 stages": llama(pp=2, dp=2, schedule="interleaved-1f1b", virtual_stages=2, zero=1),
    "zb-v": llama(pp=2, schedule="zb-v"),
    "1f1b, cp 2": llama(pp=2, cp=2),
    "dualpipe": llama(pp=2, dp=2, schedule="dualpipe", zero=1),
    "ulysses 2 x tp 2": llama(tp=2, cp=2, cp_method="ulysses"),
}
MOMENTS = {
    "bf16 moments": llama(dp=2, zero=1, sections=BF16_MOMENTS),
    "bf16 moments, tp 2": llama(tp=2, offload_optimizer=1.0, sections=BF16_MOMENTS),
}
OTHERS = {
    "ep 4": job_with("deepseek", batch=8, dp=4, ep=4),
    "experts on one": job_with("deepseek", batch=8),
    "ep 2 x tp 2, whole experts": job_with("deepseek", batch=8, dp=2, ep=2, tp=2, expert_tp=1, sequence_parallel=True),
    "ep 2, zero 2": job_with("deepseek", batch=8, dp=2, ep=2, zero=2),
    "PowerSGD of 2": powersgd(dp=2),
    "PowerSGD of 3": powersgd(dp=3),
    "PowerSGD of 4, zero 1": powersgd(dp=4, zero=1),
    "PowerSGD of 2 x pp 2": powersgd(dp=2, pp=2),
}
PLANS = DENSE | OTHERS | MOMENTS
PAIRS = [
    ("tp 4 x pp 2", "dp 8, zero 3"), ("dp 8, zero 3", "tp 4 x pp 2"), ("dp 8, zero 3", "dp 3"),
    ("tp 4 x pp 2", "dp 3, zero 2"), ("zb-v", "1f1b, cp 2"), ("1f1b, cp 2", "zb-v"),
    ("pp 2 of 4 stages", "dp 3, zero 2"), ("dp 8, hybrid", "one"),
    ("dp 8, hybrid", "dp 2, zero 1, half on the host"),
    ("dp 2, zero 1, half on the host", "dualpipe"), ("dualpipe", "ulysses 2 x tp 2"),
    ("ulysses 2 x tp 2", "tp 2 x pp 2, sequence parallel"), ("tp 2 x pp 2, sequence parallel", "pp 2, uneven"),
    ("pp 2, uneven", "pp 2, gpipe, recomputing"), ("pp 2, gpipe, recomputing", "tp 2 x dp 2, other order"),
    ("tp 2 x dp 2, other order", "dp 2, zero 1, half on the host"),
    ("ep 4", "experts on one"), ("experts on one", "ep 4"), ("ep 4", "ep 2 x tp 2, whole experts"),
    ("ep 2 x tp 2, whole experts", "ep 2, zero 2"),
    ("PowerSGD of 2", "PowerSGD of 4, zero 1"), ("PowerSGD of 4, zero 1", "PowerSGD of 3"),
    ("PowerSGD of 3", "PowerSGD of 2 x pp 2"), ("PowerSGD of 2 x pp 2", "PowerSGD of 2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved_under(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[float]]]:
    """A folder with a checkpoint that was written under a plan, and the losses of the run that did not stop there."""

    @cache
    def run(name: str) -> tuple[Path, list[float]]:
        folder, job = tmp_path_factory.mktemp("saved"), PLANS[name]
        return folder, run_on_mesh(job, save_and_go_on, job, folder)[0][0]

    return run


@pytest.mark.sampled(6)
@pytest.mark.processes
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_going_on_under_another_plan_is_the_same_to_rounding(
    before: str, after: str, saved_under: Callable[[str], tuple[Path, list[float]]]
) -> None:
    """Losses of about 4.6 nats, of a mean over 24 x 16 tokens in float32: far below the change that a step makes, which
    is 1e-2. Gates choose among scores, and low ranks among directions, so these are held less tightly."""
    folder, never_stopped = saved_under(before)
    went_on = run_on_mesh(PLANS[after], go_on, PLANS[after], folder)[0][0]
    assert went_on == pytest.approx(never_stopped, rel=1e-4 if before in OTHERS else 1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["int8", "topk", "powersgd"])
@pytest.mark.parametrize("after", [{"dp": 4, "zero": 2}, {"dp": 2, "tp": 2}])
def test_what_compression_lost_is_kept_under_any_plan(method: str, after: dict[str, int], tmp_path: Path) -> None:
    """The sum over replicas and kinds, which is what the next steps make up for, element by element."""
    then, now = (job_with(batch=12, compress=method, compress_least=1, **plan) for plan in ({"dp": 2}, after))
    before = summed_errors(run_on_mesh(then, save_and_tell, then, tmp_path))
    results = summed_errors(run_on_mesh(now, go_on_and_tell, now, tmp_path))
    assert all(bool(values.any()) for values in before.values()) and len(results) >= 8
    # Over tp, norms are not compressed by int8 and top-k.
    assert before.keys() == results.keys() or ("tp" in after and method != "powersgd")
    for name, values in results.items():
        torch.testing.assert_close(values, before[name], rtol=1e-5, atol=1e-9)


def summed_errors(by_rank: list[list[HeldBox]]) -> dict[str, torch.Tensor]:
    """By parameter, in full shape."""
    result: dict[str, torch.Tensor] = {}
    for held in [held for boxes in by_rank for held in boxes]:
        _, kind, name = held.name.split(".", 2)
        if kind != "query":
            into = result.setdefault(name, torch.zeros(held.full_shape[1:]))
            into[tuple(slice(*ends) for ends in held.box[1:])] += held.values[0]
    return result


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of two ranks."""
    folder, job = tmp_path_factory.mktemp("saved"), job_with(dp=2, zero=1)
    run_on_mesh(job, save_and_go_on, job, folder)
    return folder


@pytest.mark.processes
def test_the_files_are_safetensors_with_every_element_once(saved: Path) -> None:
    check_whole(open_storage(str(saved / "checkpoints")), STEPS)
    seen: dict[str, int] = {}
    full: dict[str, list[int]] = {}
    for file in sorted((saved / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            places = json.loads(opened.metadata()["boxes"])
            for key in opened.keys():  # noqa: SIM118
                name, shape, _ = places[key]
                seen[name] = seen.get(name, 0) + opened.get_tensor(key).numel()
                full[name] = shape
    assert seen == {name: torch.Size(shape).numel() for name, shape in full.items()}
    assert {name.partition(".")[0] for name in seen} == {"weights", "exp_avg", "exp_avg_sq"}


@pytest.mark.processes
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "no manifest", "manifest", "index"])
def test_what_is_not_whole_is_found_and_not_loaded(saved: Path, tmp_path: Path, harm: str) -> None:
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    step = folder / "checkpoints" / f"step-{STEPS:08d}"
    data = step / "rank-00001.safetensors"
    match harm:
        case "flip":
            raw = bytearray(data.read_bytes())
            raw[-5] ^= 1
            data.write_bytes(raw)
        case "truncate":
            data.write_bytes(data.read_bytes()[:-1])
        case "remove":
            data.unlink()
        case "no manifest":
            (step / "manifest.json").unlink()
        case "manifest" | "index":
            file = step / ("manifest.json" if harm == "manifest" else "rank-00000.json")
            file.write_bytes(file.read_bytes().replace(b"0", b"1", 1))
    storage = open_storage(str(folder / "checkpoints"))
    if harm == "no manifest":
        assert steps_kept(storage) == []
        remove_unfinished_checkpoints(storage)
        assert not step.exists()
        return
    with pytest.raises(BrokenCheckpointError):
        check_whole(storage, STEPS)
    job = job_with(dp=2, zero=1)
    assert run_on_mesh(job, began_anew, job, folder) == [True, True]


@pytest.mark.processes
def test_another_model_is_refused_with_every_field(saved: Path) -> None:
    job = job_with(sections={"model": {"ffn": 64, "vocab": 300}})
    assert run_on_mesh(job, refusal, job, saved)[0] == ["model.ffn", "model.vocab"]


def test_a_remote_folder_is_as_good(tmp_path: Path) -> None:
    job = job_with(sections={"checkpoint": {"path": "memory://test-checkpoints"}})
    losses = run_on_mesh(job, save_and_load_in_memory, job, tmp_path)[0]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("place", ["reference://x", "simplecache::s3://x/y", "github://a/b"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(PlanError, match=r"no place for checkpoints|can't be reached"):
        open_storage(place)


def test_what_is_newer_and_not_whole_pushes_nothing_out(saved: Path, tmp_path: Path) -> None:
    """A run that went on from an older checkpoint keeps what it saves."""
    storage = open_storage(str(tmp_path))
    for step in (10, 20, 100, 120):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}" / "manifest.json").write_text("broken")
    remove_old(storage, CheckpointSpec(keep_last=1), 20)
    assert steps_kept(storage) == [120, 100, 20]


def test_a_disk_that_fails_is_no_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that can't be read now is there, and may be whole."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalStorage, "read", fail)
    with pytest.raises(UnreadCheckpointError, match=r"can't be read now by 1 rank: .*Input/output error"):
        run_on_mesh(job_with(), began_anew, job_with(), saved)


@pytest.mark.parametrize("name", ["step-00000003", "step-00000003/rank-00000.json"])
def test_a_link_leads_nowhere(tmp_path: Path, name: str) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "kept" / name
    link.parent.mkdir(parents=True)
    if name.endswith("json"):
        elsewhere.write_text("a file of somebody")
    else:
        elsewhere.mkdir()
    link.symlink_to(elsewhere)
    with suppress(OSError):
        open_storage(str(tmp_path / "kept")).write("step-00000003/rank-00000.json", [b"ours"])
    assert elsewhere.read_text() == "a file of somebody" if elsewhere.is_file() else not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("before", "after"),
    [("dp 3", "bf16 moments"), ("bf16 moments", "dp 3"), ("bf16 moments", "bf16 moments, tp 2")],
)
def test_moments_go_on_in_other_numbers(
    before: str, after: str, saved_under: Callable[[str], tuple[Path, list[float]]]
) -> None:
    """Float32 is rounded to bf16, and bf16 widened; where both are bf16, bit for bit."""
    folder, _ = saved_under(before)
    saved = full_states(load_file_states(folder))
    there = full_states(
        [box for boxes in run_on_mesh(PLANS[after], go_on_and_hold, PLANS[after], folder) for box in boxes]
    )
    assert saved.keys() == there.keys()
    for name, values in there.items():
        is_moment = name.startswith("exp_avg")
        assert values.dtype == (torch.bfloat16 if is_moment and after in MOMENTS else torch.float32)
        assert torch.equal(values, saved[name].to(values.dtype))


def load_file_states(folder: Path) -> list[HeldBox]:
    """The boxes in the files of a checkpoint, as another reader of safetensors has them."""
    results = []
    for file in sorted((folder / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key, (name, shape, box) in json.loads(opened.metadata()["boxes"]).items():
                results.append(HeldBox(name, tuple(shape), tuple(map(tuple, box)), opened.get_tensor(key)))
    return results


def full_states(boxes: list[HeldBox]) -> Boxes:
    """The whole tensors."""
    result: Boxes = {}
    for box in boxes:
        full = result.setdefault(box.name, torch.full(box.full_shape, torch.nan, dtype=box.values.dtype))
        full[tuple(slice(*ends) for ends in box.box)] = box.values
    return result


METHODS = [{"compress": "powersgd"}, {"compress": "topk"}, {"compress": "int8"}, {"compress": "bf16"}, {}]


@pytest.mark.processes
def test_any_method_of_compression_goes_on_with_what_another_lost(tmp_path: Path) -> None:
    """One method sends what the other has not sent yet; a method that keeps nothing drops it."""
    for number, (before, after) in enumerate(zip(METHODS, METHODS[1:] + METHODS[:1], strict=True)):
        then, now = (job_with(batch=12, dp=2, compress_least=1, **plan) for plan in (before, after))
        lost = summed_errors(run_on_mesh(then, save_and_tell, then, tmp_path / str(number)))
        result = summed_errors(run_on_mesh(now, go_on_and_tell, now, tmp_path / str(number)))
        for name, values in result.items():
            expected = lost.get(name, torch.zeros_like(values))
            torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-9)
