"""Limits: every number of a job has some, a fault names them and a way out, and what several fields make has them too.

A number beyond its limit is refused at once, and one within it is computed in a bounded time and memory.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cli.checked_job import load
from shardwright.cli.main import main
from shardwright.config import largest
from shardwright.config.base import PlanError, Spec
from shardwright.config.cluster import DeviceSpec, LevelSpec, PartSpec
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import SoftwareSpec
from shardwright.planner.scaling import sizes_of
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.shape_program import shape_faults

SOON_S = 20.0  # generous: only a hang or a loop over all that is asked for takes so long


def numbers(spec: type[Spec], section: str = "") -> Iterator[tuple[str, type, dict[str, Any]]]:
    """(name, int or float, limits) of every number of a description, in whatever section or list."""
    for name, field in spec.model_fields.items():
        annotation: Any = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Spec):
            yield from numbers(annotation, f"{section}{name}.")
        elif annotation in (int, float):
            yield f"{section}{name}", annotation, limits_in(field.metadata)
        else:
            for inner, metadata in leaves(annotation):
                yield f"{section}{name}[]", inner, limits_in(metadata)


def leaves(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[type, tuple[Any, ...]]]:
    """Numbers within a list, tuple or table."""
    if annotation in (int, float):
        yield annotation, metadata
    elif hasattr(annotation, "__metadata__"):
        yield from leaves(annotation.__origin__, annotation.__metadata__)
    elif get_origin(annotation) in (list, tuple, dict):
        for inner in get_args(annotation):
            yield from leaves(inner)


def limits_in(metadata: Any) -> dict[str, Any]:
    """Names and values of limits; a Field within Annotated has its own list of them."""
    result: dict[str, Any] = {}
    for item in metadata:
        result |= limits_in(item.metadata) if hasattr(item, "metadata") else {}
        result |= {key: getattr(item, key) for key in ("ge", "gt", "le", "lt") if getattr(item, key, None) is not None}
    return result


NUMBERS = list(numbers(JobSpec))


@pytest.mark.parametrize("spec", [JobSpec, DeviceSpec, SoftwareSpec, PartSpec, LevelSpec], ids=lambda s: s.__name__)
def test_every_number_has_a_least_and_a_most(spec: type[Spec]) -> None:
    for name, _, limits in numbers(spec):
        assert {"ge", "gt"} & limits.keys(), name
        assert {"le", "lt"} & limits.keys(), name


@pytest.mark.parametrize(
    ("name", "kind", "limits"), [n for n in NUMBERS if "[]" not in n[0]], ids=lambda n: str(n)[:40]
)
def test_the_largest_is_a_value_and_one_more_is_not(name: str, kind: type, limits: dict[str, Any]) -> None:
    """Of a single field: what it makes with others is another fault."""
    most = limits.get("le", limits.get("lt"))
    more = most + 1 if kind is int else most * 1.5
    (fault,) = faults_of(f"{name}={json.dumps(more)}")
    assert fault.startswith((f"{name} = ", f"{name} is a number of"))
    assert "it should be less than" in fault or more >= 2**63  # more than TOML's numbers can be
    assert any(text in fault for text in (f"{most:g}", f"{most}", f"{int(most)}", f"{int(most) - 1}"))
    if "le" in limits:
        assert not any(fault.startswith(f"{name} = ") for fault in faults_of(f"{name}={json.dumps(kind(most))}"))


def faults_of(*overrides: str, job: str = "quickstart") -> list[str]:
    """The faults of a job; nothing may be a crash."""
    try:
        load(job, overrides)
    except PlanError as error:
        return error.faults
    return []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["plan.dp=65536", "plan.tp=65536"], "dp 65536 x tp 65536 x pp 2 = 8,589,934,592 ranks, and a job may have"),
        (
            ["cluster.nodes=100000", "cluster.devices_per_node=1000"],
            "cluster 'this-machine' has 100,000,000 devices in its nodes, and a cluster may have at most 16,777,216",
        ),
        (
            ["model.hidden=4194304", "model.ffn=4194304", "model.layers=2048"],
            "2,048 layers x 105,553,116,266,496 + 2 tables x 1,073,741,824 = 2.16e+17 parameters, and a model may have "
            "at most 1e+16; use fewer layers",
        ),
        (
            ["batch.global_batch_size=1073741824", "plan.microbatch_size=1048576", "model.sequence=1048576"],
            "batch.global_batch_size 1,073,741,824 x model.sequence 1,048,576 = 1.13e+15 tokens, and a step may have "
            "at most 1.1e+12; use at most 1,048,576 such sequences",
        ),
        (
            ["batch.global_batch_size=1000000000"],
            "p 2 stages x m 125,000,000 microbatches = 250,000,000 forwards, and at most 524,288 can be laid out; use "
            "at most 262,144 microbatches (p is plan.pp 2; m is batch.global_batch_size 1000000000 / (plan.dp 2 x",
        ),
        (
            [
                'plan.schedule="pipedream"', "optimizer.clip_grad_norm=0", "model.tied_embeddings=false",
                "run.log_every=100000", "run.eval_every=0", "optimizer.steps=1000000",
            ],
            "p 2 stages x m 4 microbatches x 100,000 steps = 800,000 forwards",
        ),
    ],
)  # fmt: skip
def test_what_several_fields_make_has_limits(overrides: list[str], says: str) -> None:
    start_s = time.process_time()
    results = faults_of(*overrides)
    assert any(says in fault for fault in results), results
    assert time.process_time() - start_s < SOON_S


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique_by=lambda number: number[0]), st.data())
def test_any_large_numbers_are_a_job_or_a_fault(chosen: list[Any], data: st.DataObject) -> None:
    """No crash, no hang: a power of two of each field up to its largest."""
    overrides = []
    for name, kind, limits in chosen:
        most = limits.get("le", limits.get("lt"))
        least = limits.get("ge", limits.get("gt"))
        values = [most, most / 2, least, least + 1, 2 ** data.draw(st.integers(0, 40))]
        value = kind(data.draw(st.sampled_from(values)))
        overrides.append(f"{name.removesuffix('[]')}={[value] if '[]' in name else value!r}")
    start_s = time.process_time()
    faults_of(*overrides, job=data.draw(st.sampled_from(["quickstart", "quickstart-moe", "llama3-405b-16k"])))
    assert time.process_time() - start_s < SOON_S


@pytest.mark.parametrize("name", SCHEDULES.names)
def test_shapes_have_a_largest(name: str) -> None:
    """And one beyond it is refused before anything is made."""
    virtual = 2 if name in ("interleaved-1f1b", "looped-bfs") else 1
    for shape in (
        PipelineShape(largest.PIPELINE_RANKS + 2, 4 * largest.PIPELINE_RANKS, virtual),
        PipelineShape(4, largest.COMPUTATIONS, virtual),
    ):
        faults = shape_faults(name, shape)
        assert faults
        assert all("; use " in fault for fault in faults)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["schedule", "1f1b", "--stages", "10000"], "a pipeline of p 10,000 ranks is too long; use at most 1,024"),
        (["schedule", "interleaved-1f1b", "--virtual", "1000000"], "p 4 ranks x 1,000,000 stages on each x m 8 micro"),
        (["schedule", "1f1b", "--steps", "100000000"], "x 100,000,000 steps = 3,200,000,000 forwards"),
        (["schedule", "pipedream", "--microbatches", "100000"], "p 4 stages x m 100,000 microbatches x 4 steps"),
        (
            ["schedule", "1f1b", "--communication", "1e308"],
            "--communication is 1e+308, and it must be 0, or from 1e-09",
        ),
        (["schedule", "1f1b", "--forward", "1e-300"], "--forward is 1e-300, and it must be 0, or from 1e-09 to 1e+09"),
        (["schedule", "auto", "--alive", "1e300"], "--alive is 1e+300, and it must be 0"),
        (
            ["schedule", "--compare", "--stages", "100000"],
            "zb-v is left out: a pipeline of p 100,000 ranks is too long",
        ),
        (
            ["schedule", "--compare", "--stages", "256", "--microbatches", "1024"],
            "256 stages x 1,024 microbatches = 262,144 are more than 8,192; use at most 32 microbatches",
        ),
        (["simulate", "quickstart", "--steps", "1000000000"], "x 1,000,000,000 steps = 8,000,000,000 forwards"),
        (["simulate", "quickstart", "--communication", "nan"], "--communication is nan, and it must be 0"),
        (
            ["estimate", "gpt3-175b-1024", "--set", "cluster.checkpoint_gb_per_s=1e-300"],
            "cluster.checkpoint_gb_per_s = 1e-300: it should be 0, which is unknown, or at least 1e-09",
        ),
        (["estimate", "quickstart", "--set", "model.layers=1000000"], "model.layers = 1000000: it should be less than"),
        (
            ["estimate", "quickstart", "--set", "model.moe.ffn=99999999999999999999999"],
            "model.moe.ffn is a number of 77 bits",
        ),
        (
            ["explain", "quickstart", "--set", "plan.bucket_mib=1e-300"],
            "plan.bucket_mib = 1e-300: it should be greater",
        ),
        (["train", "quickstart", "--set", "batch.global_batch_size=1000000000"], "m 125,000,000 microbatches"),
        (["scale", "llama3-405b-8k", "--devices", "1-100000000000000000000"], "the largest cluster has 16,777,216"),
        (["scale", "llama3-405b-8k", "--devices", ",".join(map(str, range(8, 1000, 8)))], "--devices has 124 sizes"),
        (
            ["scale", "llama3-405b-8k", "--devices", "9" * 5000],
            "'999999999999999999999999999999999999999999999999999999",
        ),
        (
            ["plan", "llama3-405b-8k", "--between", f"plan.tp=1,{'9' * 5000}"],
            "with whole numbers from 1 to 1,073,741,824",
        ),
        (["plan", "llama3-405b-8k", "--keep", "plan.virtual_stages=foo"], 'plan.virtual_stages = "foo": it should be'),
        (["plan", "llama3-405b-8k", "--tokens", "inf", "--days", "nan"], "--tokens is inf, and it must be from 0 to"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_commands_refuse_what_is_too_large(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
    monkeypatch.setenv("COLUMNS", "10000")  # each fault is one line
    start_s = time.process_time()
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert says in err
    assert time.process_time() - start_s < SOON_S


def test_sizes_double_from_one_end_to_the_other() -> None:
    assert sizes_of("8, 64-1024, 100") == [8, 64, 100, 128, 256, 512, 1024]
    assert sizes_of("3-20") == [3, 6, 12]
    assert sizes_of(f"1-{largest.RANKS}")[-1] == largest.RANKS


@pytest.mark.parametrize("job", ["llama3-405b-16k", "megatron-1t-3072", "deepseek-v3"])
def test_what_is_published_is_far_from_every_limit(job: str) -> None:
    """Sixteen times as wide, deep, long or many is still a job, where it was one."""
    spec = load_job(job)
    assert 16 * spec.plan.world <= largest.RANKS
    assert 8 * spec.model.layers <= largest.LAYERS
    assert 16 * spec.model.hidden <= largest.WIDTH
    assert 16 * spec.model.sequence * spec.batch.global_batch_size <= largest.TOKENS
    assert 16 * spec.plan.num_stages * spec.num_microbatches <= largest.COMPUTATIONS
