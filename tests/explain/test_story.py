"""The story of a step adds up: its seconds to the prediction's, its bytes to what ranks count."""

import json
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.api.explained import Explained
from shardwright.cli.checked_job import load
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job, make_job
from shardwright.config.model_shape import shape_of
from shardwright.config.rank_order import DEFAULT_ORDER, ORDERS
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.cost.topology import Group
from shardwright.cost.wire_bytes import ring_sent
from shardwright.explain.rank_groups import groups_of_rank_0, rank_order
from shardwright.explain.step_traffic import link_uses
from shardwright.explain.story import Story, portions, tell
from shardwright.layers.query import grid_of
from shardwright.layers.stage_contents import layer_kinds
from shardwright.memory.budget import meet_budget
from shardwright.memory.step_collectives import Traffic, step_ledger
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.report.explain.story_dict import story_dict
from shardwright.report.explain.story_text import story_text
from shardwright.schedule.job_program import job_program, plan_faults
from shardwright.sharding.groups import PP, axis_groups
from shardwright.sharding.mesh import MeshShape
from shardwright.simulate.closed_form import step_time
from shardwright.train.build import build
from shardwright.train.step_metrics import link_use
from shardwright.train.train_step import train_step
from support.cases import EXPERTS, KINDS, context_bytes, made_up_tokens, of_replicas, ring_bytes, small_job
from support.expert_traffic import ExpertRanks, sent_direct
from support.mesh_lines import expert_array, lines, mesh_array
from support.ranks import run_on_mesh

LLAMA = {
    "layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 4096, "vocab": 32000, "sequence": 2048,
}  # fmt: skip
MOE = {"experts": 16, "top_k": 2, "ffn": 1024, "shared_experts": 1, "first_dense": 2}
BIG = """
name = "big"
[model]
name = "llama3-8b"
[cluster]
device = "h100-sxm"
devices_per_node = 8
nodes = 128
intra_node = { bandwidth_gb_per_s = 450 }
inter_node = { bandwidth_gb_per_s = 50 }
[plan]
dp = 32
tp = 8
pp = 4
zero = 1
sequence_parallel = true
[batch]
global_batch_size = 1024
[precision]
compute = "bf16"
"""


def job_of(plan: dict[str, Any], moe: dict[str, Any] | None = None, batch: int = 32, **more: Any) -> JobSpec:
    """On H100s, eight a node, where one node is enough or some are filled."""
    world = plan.get("dp", 1) * plan.get("tp", 1) * plan.get("pp", 1) * plan.get("cp", 1)
    cluster = {"device": "h100-sxm", "devices_per_node": min(8, world), "nodes": max(1, world // 8)}
    links = {"intra_node": {"bandwidth_gb_per_s": 450}, "inter_node": {"bandwidth_gb_per_s": 50}}
    job = make_job(
        {
            "name": "made", "model": LLAMA | ({"moe": moe} if moe else {}), "plan": plan,
            "cluster": cluster | links, "batch": {"global_batch_size": batch}, "precision": {"compute": "bf16"},
            **more,
        }
    )  # fmt: skip
    if faults := plan_faults(job):
        raise PlanError("job", faults)
    return meet_budget(job)


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "one": ({}, None),
    "3d": ({"dp": 2, "tp": 4, "pp": 2, "sequence_parallel": True, "zero": 1}, None),
    "no sp": ({"dp": 4, "tp": 2}, None),
    "recompute": ({"dp": 4, "tp": 2, "recompute": "full", "microbatch_size": 2}, None),
    "zero 3": ({"dp": 16, "zero": 3}, None),
    "hybrid": ({"dp": 16, "zero": 2, "zero_ranks": 8}, None),
    "cp": ({"dp": 2, "cp": 4, "tp": 2, "sequence_parallel": True, "zero": 1}, None),
    "experts": ({"dp": 16, "ep": 16, "zero": 1}, MOE),
    "folded": ({"dp": 8, "tp": 2, "ep": 8, "expert_tp": 1, "sequence_parallel": True, "pp": 2}, MOE),
    "dualpipe": ({"dp": 2, "ep": 2, "pp": 4, "schedule": "dualpipev"}, MOE),
    "stages inside": ({"dp": 8, "tp": 2, "pp": 2, "zero": 1, "order": "tp-pp-dp"}, None),
    "hybrid inside": ({"dp": 8, "pp": 2, "zero": 2, "zero_ranks": 4, "order": "pp-dp"}, None),
    "experts and stages inside": ({"dp": 8, "ep": 4, "pp": 2, "zero": 1, "order": "ep-pp-dp"}, MOE),
    "tp across": ({"dp": 8, "tp": 2, "order": "dp-tp"}, None),
    "both directions": ({"dp": 2, "tp": 2, "pp": 4, "schedule": "dualpipe"}, None),
    "node-aware": ({"dp": 16, "ep": 16, "dispatch": "node-aware"}, MOE | {"shared_gate": True}),
    "stages again": ({"dp": 2, "pp": 2, "tp": 2, "recompute": "stage"}, None),
    "interleaved": ({"dp": 2, "pp": 4, "schedule": "interleaved-1f1b", "virtual_stages": 2}, None),
}


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def exposed(story: Story, *axes: str) -> float:
    return sum(c.exposed_s or 0.0 for c in story.crossings if c.axis.split(" ")[0] in axes)


@pytest.mark.parametrize("name", PLANS)
def test_seconds_add_up_to_the_prediction(name: str) -> None:
    """Operators to computing, collectives to what is exposed, each by the axis that they cross."""
    story = tell(job_of(*PLANS[name]))
    step = story.step
    assert step is not None
    m = story.job.num_microbatches / story.job.plan.num_copies  # each direction has its own
    counts = [(story.pieces.get((piece.kind, piece.policy), 0), piece) for piece in story.passes]
    assert m * sum(n * ((p.forward_s or 0) + (p.backward_s or 0)) for n, p in counts) == near(step.compute)
    assert m * sum(n * (p.again_s or 0) for n, p in counts) == near(step.again)
    assert exposed(story, "tp") == near(step.tensor)
    assert exposed(story, "cp") == near(step.context)
    assert exposed(story, "ep") == near(step.expert)
    assert exposed(story, "pp") == near(step.messages)
    assert exposed(story, "dp", "edp", "ends") == near(step.data)
    for crossing in story.crossings:
        assert crossing.seconds is not None and crossing.exposed_s is not None
        # The last stage of 1F1B computes nothing again, and a prediction has all of them do so.
        assert (crossing.seconds > 0 and crossing.calls > 0) or (name == "stages again" and crossing.exposed_s > 0)
    assert (step.again > 0) == (name in ("recompute", "stages again"))


def sums_of(story: Story) -> dict[str, Traffic]:
    """The traffic that a story tells, added up by collective and axis."""
    results: dict[str, Traffic] = {}
    for c in story.crossings:
        before = results.get(f"{c.kind} {c.axis}", Traffic(0, 0))
        results[f"{c.kind} {c.axis}"] = Traffic(before.calls + c.calls, before.payload_bytes + round(c.full_bytes))
    return dict(sorted(results.items()))


def test_pieces_are_told_in_the_order_of_the_layers() -> None:
    job = load("gemma2-27b-tpu", ())
    kinds = [piece.kind for piece in tell(job).passes if piece.kind not in ("embedding", "head")]
    shape = run_of(job).shape
    assert kinds == list(dict.fromkeys(shape.kind(layer) for layer in range(shape.layers))) and len(kinds) == 2


@pytest.mark.parametrize("name", PLANS)
def test_calls_and_bytes_add_up_to_the_account(name: str) -> None:
    """That is what the ledger of the rank has, so a story can't contradict a run."""
    story = tell(job_of(*PLANS[name]))
    rank = axis_groups(story.job.plan, PP).line(0)[story.rank]
    assert sums_of(story) == step_ledger(story.job, story.program, rank)


@pytest.mark.parametrize("name", PLANS)
def test_what_replicas_send_is_what_rings_send(name: str) -> None:
    story = tell(job_of(*PLANS[name]))
    sizes = {group.axis: len(group.ranks) for group in story.groups}
    sent = sum(c.sent.total for c in story.crossings if "dp" in c.axis)
    assert sent == pytest.approx(ring_bytes(of_replicas(sums_of(story)), sizes))


@given(st.sampled_from([2, 4, 8, 16, 64]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_a_ring_leaves_each_node_once(size: int, inside: int, rounds: int) -> None:
    inside = min(size, inside)
    sent = ring_sent(Group(size, inside), 1.0, rounds)
    assert sent.total == pytest.approx(rounds * (size - 1) / size)
    assert sent.between == pytest.approx(0.0 if inside == size else sent.total / inside)


def counted(mesh: Mesh, job: JobSpec) -> dict[str, dict[str, int]]:
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    for step in range(2):
        mesh.ledger.clear()
        train_step(replica, step, made_up_tokens(job, step)[mesh.dp.index * share :][:share])
    return mesh.ledger.table()


@pytest.mark.parametrize("plan", [{"tp": 2, "sequence_parallel": True, "dp": 2}, {"tp": 2, "pp": 2}, {"cp": 2}])
def test_bytes_are_those_that_ranks_count(plan: dict[str, Any]) -> None:
    job = small_job(**plan, microbatch_size=2, batch=4 * plan.get("dp", 1))
    story = tell(job)
    table = run_on_mesh(job, counted, job)[axis_groups(job.plan, PP).line(0)[story.rank]]
    assert {name: {"count": t.calls, "bytes": t.payload_bytes} for name, t in sums_of(story).items()} == table


def test_keys_and_values_go_round_as_often_as_ranks_count() -> None:
    job = small_job(cp=4, tp=2, sequence_parallel=True, microbatch_size=2, batch=4)
    (forward,) = (c for c in tell(job).crossings if c.axis == "cp" and c.phase == "forward")
    assert forward.sent.total == job.model.layers * job.num_microbatches * context_bytes(job)


def test_tokens_travel_as_expected() -> None:
    job = job_of(*PLANS["experts"])
    (there,) = (c for c in tell(job).crossings if c.kind == "all_to_all_v" and c.phase == "forward")
    ranks = ExpertRanks(16, 16, 8)
    counts = [[job.model.sequence * 2 / 16] * 16] * 16  # even
    (own, *_) = sent_direct(counts, ranks, row_bytes=2 * job.model.hidden, is_backward=True)
    times = there.calls / 3  # tokens, their weights, and what comes back
    assert there.sent.inside == pytest.approx(times * own.inside_bytes)
    assert there.sent.between == pytest.approx(times * own.between_bytes)


def test_experts_have_homes() -> None:
    placement = tell(job_of(*PLANS["folded"])).experts
    assert placement is not None
    assert [home[:3] for home in placement.homes] == [(2 * i, 2 * i + 1, i) for i in range(8)]
    rows = placement.num_tokens * 2  # top 2
    assert (placement.num_tokens, placement.num_rows) == (1024, rows)  # of 2048, shared by 2 ranks of tp
    assert placement.num_stay == rows / 8 and placement.rows_of_expert == rows / 2


degrees = st.sampled_from([1, 2, 4])


@settings(max_examples=50, deadline=None)
@given(degrees, degrees, degrees, degrees, degrees, st.booleans(), st.sampled_from(list(map(str, ORDERS))))
def test_groups_are_those_of_the_mesh(dp: int, tp: int, pp: int, cp: int, ep: int, whole: bool, axes: str) -> None:
    fields = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "sequence_parallel": True, "expert_tp": int(whole)}
    fields["order"] = axes
    try:
        job = small_job("mixtral", batch=16, **fields)
    except PlanError:
        return
    for group in groups_of_rank_0(job, job_program(job).placement):
        names = ["pp", "edp", "ep", "etp"] if group.axis in ("ep", "edp") else ["pp", "dp", "cp", "tp"]
        ranks = mesh_array(job.plan) if "dp" in names else expert_array(job.plan)
        of_axis = lines(ranks, *map(names.index, group.axis.split(" ")))
        assert list(group.ranks) == next(line for line in of_axis if 0 in line)
        assert group.num_groups == len(of_axis)
    order, _, of_stage = rank_order(job).removeprefix("rank = ").replace("x", "*").partition(" with s = ")
    for rank in range(job.plan.world):
        place: dict[str, Any] = dict(MeshShape.of(job.plan).coordinates(rank))
        place["s"] = eval(of_stage or "0", place)
        assert eval(order, place) == rank


def test_stages_or_replicas_are_inside_a_server() -> None:
    """The plan that is often told, 4 stages and 8 replicas on 8 servers of 4: who is in one, and what that costs."""
    result = {}
    for order in (DEFAULT_ORDER, "pp-dp"):
        job = load("gpt-100b-32xa100", (f"plan.order={order}",))
        story = tell(job)
        nodes = {group.axis: list(group.nodes) for group in story.groups}
        result[order] = nodes, step_time(run_of(job), shipped()), story_text(story)
    (replicas, near, text), (stages, far, other) = result.values()
    assert replicas["pp"] == [0, 2, 4, 6] and replicas["dp"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert stages["pp"] == [0, 0, 0, 0] and stages["dp"] == list(range(8))
    assert "Node 0 has pp 0, dp 0 to 3." in text and "Node 0 has dp 0, pp 0 to 3." in other
    assert "rank = pp x 8 + dp." in text and "rank = dp x 4 + pp." in other
    assert far.messages < near.messages / 5 and far.data > 3 * near.data
    assert far.compute == near.compute and far.bubble == pytest.approx(near.bubble)


def test_estimate_prices_an_order() -> None:
    """Of a plan that fits: no other is looked for."""
    fitting = [word for field in ("model.layers=32", "plan.recompute=full") for word in ("--set", field)]
    steps = {}
    for order in (DEFAULT_ORDER, "pp-dp"):
        words = ["estimate", "gpt-100b-32xa100", *fitting, "--json", "--set", f"plan.order={order}"]
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
        steps[order] = json.loads(done.stdout)
    assert steps[DEFAULT_ORDER] != steps["pp-dp"]


def test_groups_of_a_pipeline_that_holds_stages_twice() -> None:
    job = small_job(dp=2, pp=2, schedule="dualpipe", batch=8)
    (replicas,) = (g for g in groups_of_rank_0(job, job_program(job).placement) if g.axis == "dp")
    assert replicas.ranks == (0, 1, 2, 3) and replicas.num_groups == 1


@given(degrees, degrees, st.sampled_from([1, 2]), degrees, st.booleans())
def test_portions_multiply_to_the_batch(dp: int, tp: int, cp: int, micro: int, sp: bool) -> None:
    job = small_job(dp=dp, tp=tp, cp=cp, microbatch_size=micro, sequence_parallel=sp, batch=32)
    result = portions(job)
    for whole, part in pairwise(result):
        if part.kind != "tp rank, in products":
            assert part.num_parts * part.num_tokens == whole.num_tokens
    assert result[0].num_tokens == job.tokens_per_step


SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {}, "gpipe": {}, "1f1b": {}, "interleaved-1f1b": {"virtual_stages": 2},
    "looped-bfs": {"virtual_stages": 2}, "zb-h1": {}, "zb-h2": {}, "zb-v": {}, "v-half": {}, "v-min": {},
    "dualpipe": {}, "dualpipev": {}, "pipedream": {}, "pipedream-2bw": {}, "auto": {},
}  # fmt: skip
CHOICES = st.fixed_dictionaries(
    {
        "dp": st.sampled_from([1, 2]), "tp": st.sampled_from([1, 2]), "cp": st.sampled_from([1, 2]),
        "zero": st.integers(0, 3), "sequence_parallel": st.booleans(),
        "recompute": st.sampled_from(["none", "stage", "full", "selective"]),
        "microbatch_size": st.sampled_from([1, 2]),
        "compress": st.sampled_from(["none", "int8", "powersgd", "topk", "bf16"]),
        "cp_method": st.sampled_from(["ring", "all-gather", "ulysses"]), "ep": st.sampled_from([1, 2]),
        "expert_tp": st.sampled_from([0, 1]), "offload_optimizer": st.sampled_from([0.0, 0.5]),
        "zero_ranks": st.sampled_from([0, 2]), "order": st.sampled_from(list(map(str, ORDERS))),
    }
)  # fmt: skip
ANY_KIND = st.sampled_from([*KINDS, "qwen", "latent", "latent-plain-queries", "mixtral", "deepseek", "switch"])


def tell_whole(job: JobSpec) -> None:
    story = tell(job)
    text, result = story_text(story), story_dict(story)
    assert "Where every tensor lies" in text and json.loads(json.dumps(result))["job"] == job.name


@settings(max_examples=40, deadline=None)
@given(ANY_KIND, st.sampled_from(sorted(SCHEDULES)), CHOICES, st.booleans(), st.sampled_from(["none", "rowwise"]))
def test_every_plan_has_a_story(kind: str, schedule: str, plan: dict[str, Any], timed: bool, float8: str) -> None:
    if kind not in EXPERTS:
        plan |= {"ep": 1, "expert_tp": 0}
    if not plan["sequence_parallel"]:
        plan["expert_tp"] = 0
    if plan["zero"] == 0 or plan["dp"] == 1:
        plan["zero_ranks"] = 0
    plan["pp"] = 1 if schedule == "sequential" else 2
    try:
        job = small_job(kind, batch=16, **(plan | {"schedule": schedule} | SCHEDULES[schedule]))
        job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"clip_grad_norm": 0.0})})
        if timed:
            cluster = job.cluster.model_copy(update={"device": "h100-sxm"})
            precision = job.precision.model_copy(update={"compute": "bf16", "float8": float8})
            job = make_job(job.model_copy(update={"cluster": cluster, "precision": precision}).model_dump())
    except PlanError:
        return
    if not plan_faults(job):
        tell_whole(job)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_a_story(schedule: str) -> None:
    plan = {"pp": 1 if schedule == "sequential" else 2, "dp": 2, "schedule": schedule} | SCHEDULES[schedule]
    job = job_of(plan, optimizer={"clip_grad_norm": 0.0})
    tell_whole(job)


@pytest.mark.parametrize("job", ["quickstart", "quickstart-gpt", "quickstart-moe", "quickstart-deepseek"])
def test_command_tells_bytes_where_the_device_is_not_known(job: str) -> None:
    done = CliRunner().invoke(cli, ["explain", job])
    assert done.exit_code == 0, done.output
    assert "cluster.device is unknown; set it to one that `shardwright devices` lists" in " ".join(done.output.split())
    assert "KiB" in done.output and "GSPMD" in done.output
    result = json.loads(CliRunner().invoke(cli, ["explain", job, "--json"]).stdout)
    assert result["step"] is None and "cluster.device" in result["untimed"]
    assert all(c["full_bytes"] > 0 and c["seconds"] is None for c in result["crossings"])


def test_command_on_a_big_job(tmp_path: Any) -> None:
    file = tmp_path / "big.toml"
    file.write_text(BIG)
    result = json.loads(CliRunner().invoke(cli, ["explain", str(file), "--json"]).stdout)
    assert result["step"]["total"] > 0 and result["step"]["mfu"] < 1
    by_axis = {group["axis"]: group for group in result["groups"]}
    assert by_axis["tp"]["ranks"] == list(range(8)) and set(by_axis["tp"]["nodes"]) == {0}
    assert by_axis["dp"]["ranks"][:3] == [0, 8, 16] and by_axis["dp"]["nodes"] == list(range(32))
    sent = {c["axis"]: c["sent"] for c in result["crossings"]}
    assert sent["tp"]["between"] == 0 and sent["dp"]["inside"] == 0
    text = CliRunner().invoke(cli, ["explain", str(file)]).output
    for printed in ("ZeRO 1: ", "all_gather over tp of 64 MiB", "MFU", "rank = (pp x 32 + dp) x 8 + tp", "bubble"):
        assert printed in text, printed


@pytest.mark.parametrize("job", ["llama3-405b-16k", "deepseek-v3"])
def test_command_on_jobs_of_the_catalog(job: str) -> None:
    done = CliRunner().invoke(cli, ["explain", job, "--json"])
    result = json.loads(done.stdout)
    assert result["step"]["total"] > 0
    assert sum(c["exposed_s"] for c in result["crossings"]) < result["step"]["total"]
    assert all(group["ranks"][0] == 0 for group in result["groups"])


@pytest.mark.parametrize(
    "fields",
    [{"recompute": "selective", "recompute_operators": ["norm"]}, {"recompute": "full", "recompute_every": 2}],
)
def test_recomputation_is_told_whatever_its_fields(fields: dict[str, Any]) -> None:
    (effect,) = tell(small_job(layers=2, **fields)).effects
    assert effect.strategy == f"recompute {fields['recompute']}"
    assert effect.without_it.total_bytes > effect.with_it.total_bytes


def test_kinds_of_layers_stand_in_the_order_of_the_model() -> None:
    """However strings are hashed: windows and policies make four kinds of layers here."""
    policies = [["attention"], ["attention"], [], []]
    job = small_job("gemma", recompute="layers", recompute_layers=policies)
    answer = [(piece.kind, piece.policy) for piece in tell(job).passes if piece.kind not in ("embedding", "head")]
    in_model = layer_kinds(shape_of(job.model), grid_of(job))
    assert answer == list(dict.fromkeys(in_model))
    assert len(answer) == 4


def test_links_are_used_by_a_share_of_what_they_carry() -> None:
    """Bytes over bandwidth and time, as runs are measured: of one rank where all send alike."""
    job = load_job("gpt3-175b-1024")
    story = tell(job)
    assert story.step is not None
    inside, between = link_uses(job, story.links, story.crossings, story.step.total)
    assert (inside.place, between.place) == ("inside", "between")
    world, step_s = job.plan.world, float(story.step.total)
    sent = tuple(round(world * use.sent_bytes) for use in (inside, between))
    assert link_use(sent, step_s, world, job.cluster) == pytest.approx((inside.share, between.share))
    text = " ".join(story_text(story).split())
    assert f"Of 300 GB/s inside a node that is {100 * (inside.share or 0):.1f} % over the step." in text
    assert [use.share for use in link_uses(job, story.links, story.crossings, None)] == [None, None]


@pytest.mark.parametrize(
    ("job", "note"),
    [
        ("deepseek-v3", "by how much the predicted step is longer"),  # ZeRO 1: no gathers for each microbatch
        ("quickstart", ""),
    ],
)
def test_more_exposed_seconds_than_a_collective_takes_are_explained(job: str, note: str) -> None:
    overrides = () if note else ("cluster.device=h100-sxm", "plan.dp=1", "plan.pp=1")
    text = " ".join(str(Explained(load_job(job, overrides))).split())
    assert ("by how much the predicted step is longer" in text) == bool(note)
    assert "gathers each layer for every microbatch" not in text


def test_one_replica_sums_nothing_over_replicas() -> None:
    """Sequence parallel leaves sums over tensor ranks, which hold different parts of a layer, and are told as that."""
    told = str(
        sw.load("tiny-llama", "plan.tp=2", "plan.sequence_parallel=true", devices=2, device="h100-sxm").explain()
    )
    told = " ".join(told.split())
    assert "There is one replica. Each of 2 tensor ranks has only a part of the gradient of parameters" in told
    assert "hold the same part of a layer and have seen different tokens" not in told
