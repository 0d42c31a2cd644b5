"""Descriptions: the catalog, reading and overriding, defaults, and the arithmetic of meshes, stages and FLOPs."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.checks.check import job_faults
from shardwright.config.checks.check_model import model_faults
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.divisors import all_divisors, divisors, nearest_divisors
from shardwright.config.field_texts import job_fields
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job, make_job, read_job
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.plan import PlanSpec, split_evenly
from shardwright.config.precision import PrecisionSpec
from shardwright.report.toml_files import write_toml
from shardwright.sharding.groups import EP, REPLICAS, TP, axis_groups
from shardwright.sharding.mesh import AXES, MeshShape


def catalog_model(name: str) -> ModelSpec:
    return ModelSpec.model_validate(catalog.read("models", name))


# --- the catalog ---


@pytest.mark.parametrize("name", catalog.names("jobs"))
def test_catalog_jobs_can_run(name: str) -> None:
    job = load_job(name)
    assert job.name == name
    assert job_faults(job) == []


@pytest.mark.parametrize("name", catalog.names("models"))
def test_catalog_models_are_consistent(name: str) -> None:
    model = catalog_model(name)
    assert model.name == name
    assert model_faults(model) == []


@pytest.mark.parametrize("name", catalog.names("clusters"))
def test_catalog_clusters_are_known(name: str) -> None:
    cluster = ClusterSpec.model_validate(catalog.read("clusters", name))
    assert cluster.name == name
    assert cluster.device in ["unknown", *catalog.names("devices")]


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_catalog_devices_say_where_their_numbers_come_from(name: str) -> None:
    device = DeviceSpec.model_validate(catalog.read("devices", name))
    assert device.name == name
    assert device.source
    assert device.memory_gb_per_s > 0 and device.multiprocessors > 0 and device.link_domain > 0
    rates = device.peak_tflops
    ascending = [rates[number] for number in ("float32", "float16", "bfloat16") if number in rates]
    assert ascending[0] > 0 and ascending == sorted(ascending)
    if "float16" in rates and "bfloat16" in rates:
        assert rates["float16"] == rates["bfloat16"]
    if "float8" in rates:
        times = 1 if name == "gaudi3" else 2  # its engines multiply both at one rate
        assert rates["float8"] == pytest.approx(times * rates["bfloat16"], rel=0.02)


def test_no_two_devices_answer_to_one_cuda_name() -> None:
    names = [cuda for name in catalog.names("devices") for cuda in catalog.read("devices", name).get("cuda_names", [])]
    assert len(names) == len(set(names))


def test_a_name_that_is_not_in_the_catalog() -> None:
    with pytest.raises(KeyError, match="did you mean gpt2"):
        catalog.read("models", "gpt-2")
    assert catalog.nearest("qwen3-30b", catalog.names("models"))[0] == "qwen3-30b-a3b", "the beginning of a name"


# --- reading and overriding ---


def test_the_default_job_can_run() -> None:
    assert make_job({}) == JobSpec()


@pytest.mark.parametrize("name", catalog.names("jobs"))
def test_a_job_survives_being_written_as_toml(name: str, tmp_path: Path) -> None:
    job = load_job(name)
    write_toml(tmp_path / "job.toml", job)
    assert load_job(str(tmp_path / "job.toml")) == job


def test_what_a_job_sets_back_to_the_default_survives_too(tmp_path: Path) -> None:
    """The entry that a name stands for has another value than the default."""
    to_defaults = ["model.kv_heads=0", "cluster.network.kind=unknown", "cluster.topology.levels=[]"]
    job = load_job("llama3-405b-16k", to_defaults)
    assert (job.model.kv_heads, job.cluster.network.kind, job.cluster.topology.levels) == (0, "unknown", [])
    write_toml(tmp_path / "job.toml", job)
    assert load_job(str(tmp_path / "job.toml")) == job


def test_a_file_without_a_field_is_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for text, overrides, told in (("", [], True), ("# nothing\n", [], True), ("", ["plan.tp=2"], False)):
        file.write_text(text)
        assert ("sets no field, so defaults hold" in read_job(str(file), overrides).filled_in) == told


def test_a_job_is_called_after_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("")
    assert load_job(str(tmp_path / "mine.toml")) == JobSpec(name="mine")
    (tmp_path / "mine.toml").write_text('name = "ours"')
    assert load_job(str(tmp_path / "mine.toml")).name == "ours"


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("plan.dp=4", "plan.dp", 4),
        (" plan . dp = 4", "plan.dp", 4),
        ("optimizer.learning_rate=3e-4", "optimizer.learning_rate", 3e-4),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("plan.sequence_parallel=false", "plan.sequence_parallel", False),
        ("plan.layout=[1, 3]", "plan.layout", [1, 3]),
        ("plan.schedule=1f1b", "plan.schedule", "1f1b"),
        ('plan.schedule="gpipe"', "plan.schedule", "gpipe"),
        ("data.path=a=b.txt", "data.path", "a=b.txt"),
        ("data.path=", "data.path", ""),
        ("run.sample_prompt='5'", "run.sample_prompt", "5"),
        ("name=other", "name", "other"),
        ("cluster.inter_node.latency_us=3", "cluster.inter_node.latency_us", 3.0),
    ],
)
def test_an_override(override: str, place: str, value: Any) -> None:
    changed: Any = load_job("quickstart", [override])
    for part in place.split("."):
        changed = getattr(changed, part)
    assert changed == value
    assert type(changed) is type(value)


def test_the_last_override_counts() -> None:
    assert load_job("quickstart", ["plan.dp=4", "plan.dp=1"]).plan.dp == 1


def test_fields_beside_a_catalog_name_override_the_catalog() -> None:
    model = load_job("quickstart", ["model.name=gpt2", "model.layers=2"]).model
    assert (model.name, model.layers, model.hidden, model.vocab) == ("gpt2", 2, 768, 50257)


def test_a_name_beside_fields_may_be_any() -> None:
    model = make_job({"model": {"name": "mine", "layers": 2}}).model
    assert model == ModelSpec(name="mine", layers=2)


def test_overriding_leaves_the_catalog_alone() -> None:
    before = load_job("quickstart")
    load_job("quickstart", ["plan.dp=4", "model.vocab=1000"])
    assert load_job("quickstart") == before


# --- strictness ---


@pytest.mark.parametrize(
    "fields",
    [
        {"plan": {"dp": "4"}},
        {"plan": {"dp": 4.0}},
        {"plan": {"dp": True}},
        {"plan": {"dp": None}},
        {"plan": {"sequence_parallel": 1}},
        {"plan": {"sequence_parallel": "true"}},
        {"plan": {"layout": "22"}},
        {"plan": {"layout": [2, "2"]}},
        {"optimizer": {"learning_rate": "1e-3"}},
        {"optimizer": {"learning_rate": float("nan")}},
        {"run": {"folder": 3}},
        {"data": []},
        {"plan": {"unknown": 1}},
        {"unknown": {}},
    ],
)
def test_nothing_is_converted_and_nothing_ignored(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        make_job(fields)


def test_a_description_does_not_change() -> None:
    job = JobSpec()
    with pytest.raises(ValidationError):
        job.plan.dp = 2
    assert JobSpec().plan.dp == 1


def test_every_field_has_a_default_and_a_meaning() -> None:
    for section, rows in job_fields().items():
        for shown, meaning in rows:
            assert " = " in shown
            assert meaning.endswith("."), (section, shown)


def test_shown_defaults_are_toml_that_makes_the_default_job(tmp_path: Path) -> None:
    lines = []
    for section, rows in job_fields().items():
        lines += [f"[{section}]"] if section else []
        lines += [shown for shown, _ in rows]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    assert load_job(str(tmp_path / "job.toml")) == JobSpec()


# --- the model ---


def test_defaults_that_follow_from_other_fields() -> None:
    model = ModelSpec(hidden=96, heads=6)
    assert (model.num_kv_heads, model.head_size, model.ffn_size) == (6, 16, 384)
    model = ModelSpec(hidden=96, heads=6, kv_heads=2, head_dim=32, ffn=100)
    assert (model.num_kv_heads, model.head_size, model.ffn_size) == (2, 32, 100)


def test_flops_of_gpt2_by_hand() -> None:
    model = catalog_model("gpt2")
    # Per layer: query, key, value and output 4 x 768 x 768, MLP 2 x 768 x 3072. The head: 50257 x 768.
    per_layer, head = 2_359_296 + 4_718_592, 38_597_376
    assert shape_of(model).matrix_parameters == 12 * per_layer + head == 123_532_032
    # Scores and their use, 2 FLOPs an element each, forward once and backward twice: 12 x layers x hidden x sequence.
    attention = 12 * 12 * 768 * 1024
    assert shape_of(model).flops_per_token() == 6 * 123_532_032 + attention == 854_438_400
    # With positions, biases and norms these are the 124,439,808 parameters of the released checkpoint.
    biases, norms = 12 * (3 * 768 + 768 + 3072 + 768), 12 * 4 * 768 + 2 * 768
    assert shape_of(model).matrix_parameters + 1024 * 768 + biases + norms == 124_439_808


def test_matrix_parameters_of_llama3_8b() -> None:
    model = catalog_model("llama3-8b")
    embedding, norms = 128_256 * 4096, 65 * 4096
    assert shape_of(model).matrix_parameters + embedding + norms == 8_030_261_248  # as released


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_divisors_in_words() -> None:
    assert nearest_divisors(12, 5) == "4 or 6"
    assert nearest_divisors(12, 4) == "4 or 6"
    assert nearest_divisors(12, 99) == "12"
    assert all_divisors(12) == "1, 2, 3, 4, 6 or 12"
    assert all_divisors(1) == "1"


# --- the plan ---


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_an_even_split_covers_all_once(total: int, parts: int) -> None:
    ranges = [split_evenly(total, parts, index) for index in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # the longer ones come first


@given(st.integers(1, 64), st.integers(1, 4), st.data())
def test_stages_hold_all_layers_evenly(pp: int, virtual_stages: int, data: st.DataObject) -> None:
    plan = PlanSpec(pp=pp, virtual_stages=virtual_stages)
    layers = data.draw(st.integers(plan.num_stages, 400))
    counts = plan.stage_layers(layers)
    assert len(counts) == plan.num_stages
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    # The first stage also embeds, and the last has the head: neither is the only longer one.
    if len(counts) > 2:
        assert max(counts[0], counts[-1]) <= max(counts[1:-1])
    assert counts[0] >= counts[-1]


def test_a_layout_is_taken_as_it_is() -> None:
    assert PlanSpec(pp=4, layout=[0, 3, 1, 0]).stage_layers(4) == [0, 3, 1, 0]


@pytest.mark.parametrize("name", catalog.names("jobs"))
def test_the_same_job_on_one_rank(name: str) -> None:
    job = load_job(name)
    one = job.as_one_rank()
    assert one.plan.world == one.plan.num_stages == 1
    assert one.plan.microbatch_size == job.plan.microbatch_size
    assert one.num_microbatches == job.num_microbatches * job.plan.dp
    assert one.tokens_per_step == job.tokens_per_step
    assert one.model_copy(update={"plan": job.plan}) == job
    assert job_faults(one.model_copy(update={"cluster": ClusterSpec()})) == []


def test_numbers_of_a_job() -> None:
    job = make_job(
        {"plan": {"dp": 2, "microbatch_size": 3}, "batch": {"global_batch_size": 24}, "model": {"sequence": 10}}
    )
    assert job.num_microbatches == 4
    assert job.tokens_per_step == 240


# --- precision ---


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, (4, 4, 4)),
        ({"compute": "bf16"}, (2, 4, 4)),
        ({"compute": "bf16", "gradients": "compute"}, (2, 2, 2)),
        ({"compute": "fp16", "gradients": "compute", "reduce": "float32"}, (2, 2, 4)),
        ({"gradients": "compute"}, (4, 4, 4)),
    ],
)
def test_bytes_of_numbers(fields: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    precision = PrecisionSpec(**fields)
    assert (precision.compute_bytes, precision.gradient_bytes, precision.reduce_bytes) == sizes


def test_only_fp16_scales_the_loss() -> None:
    assert PrecisionSpec(compute="fp16").scales_loss
    assert not PrecisionSpec(compute="fp16", loss_scale=0.0).scales_loss
    assert not PrecisionSpec(compute="bf16").scales_loss


# --- the mesh ---

MESHES = st.tuples(*(st.integers(1, 6) for _ in AXES)).map(
    lambda sizes: MeshShape.of(PlanSpec(**dict(zip(AXES, sizes, strict=True))))
)


def as_array(shape: MeshShape) -> np.ndarray:
    sizes = [shape.sizes[axis] for axis in AXES]
    return np.arange(np.prod(sizes)).reshape(sizes)


@given(MESHES)
def test_the_mesh_is_a_range_reshaped(shape: MeshShape) -> None:
    ranks = as_array(shape)
    places = [tuple(shape.coordinates(rank).values()) for rank in range(ranks.size)]
    assert len(set(places)) == ranks.size
    assert [ranks[place] for place in places] == list(range(ranks.size))
    assert all(list(shape.coordinates(rank)) == list(AXES) for rank in range(ranks.size))


@given(MESHES, st.booleans(), st.data())
def test_experts_fold_the_ranks_of_a_stage(shape: MeshShape, are_cut: bool, data: st.DataObject) -> None:
    """Ranks of an ep line have other tokens or another part of them, and what they exchange stays in their stage."""
    sizes = shape.sizes
    ranks = sizes["dp"] * sizes["cp"] * (1 if are_cut else sizes["tp"])
    ep = data.draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
    plan = PlanSpec(**sizes, ep=ep, expert_tp=0 if are_cut else 1)
    for line in axis_groups(plan, EP).lines():
        places = [shape.coordinates(rank) for rank in line]
        assert len({place["pp"] for place in places}) == 1
        assert len({place["tp"] for place in places}) == 1 or not are_cut
        assert len(line) == ep
    assert axis_groups(plan, REPLICAS[True]).size == ranks // ep


@given(MESHES)
def test_ranks_of_a_tensor_parallel_group_are_neighbours(shape: MeshShape) -> None:
    for line in axis_groups(PlanSpec(**shape.sizes), TP).lines():
        assert line == list(range(line[0], line[0] + shape.sizes["tp"]))


def test_a_mesh_in_words() -> None:
    shape = MeshShape.of(PlanSpec(pp=2, dp=1, tp=2))
    assert shape.describe(3) == "rank 3 (pp 1, dp 0, tp 1)"
    assert shape.lines() == [
        "mesh pp 2 x dp 1 x tp 2",
        "  pp 0, dp 0: ranks 0 1",
        "  pp 1, dp 0: ranks 2 3",
    ]
    inside = MeshShape.of(PlanSpec(pp=2, dp=2, order="pp-dp"))
    assert inside.describe(1) == "rank 1 (dp 0, pp 1, tp 0)"
    assert inside.lines()[:2] == ["mesh dp 2 x pp 2 x tp 1", "  dp 0, pp 0: ranks 0"]


def test_a_name_of_a_set_is_refused_with_one_that_is_not() -> None:
    for name, plain in (("a b/c", "a-b-c"), ("  ", "my-set"), ("häufig", "h-ufig")):
        with pytest.raises(PlanError, match=f"name it {plain}, say"):
            make_job({"data": {"validation": [{"name": name, "path": "README.md"}]}, "batch": {"global_batch_size": 8}})
    assert (
        load_job("quickstart", ['data.validation=[{name="fr-1.x", path="README.md"}]']).data.validation[0].name
        == "fr-1.x"
    )


def test_equal_descriptions_have_one_hash_and_share_defaults() -> None:
    """With lists, too; and a default that a description leaves out is not copied for it."""
    fields = {"model": {"layers": 4}, "plan": {"recompute": "selective", "recompute_operators": ["norm"]}}
    one, other = (make_job(fields) for _ in range(2))
    assert one == other and one is not other and hash(one) == hash(other)
    assert one.data is other.data and one.plan is not other.plan
    assert len({one, other, make_job({"model": {"layers": 2}})}) == 2
