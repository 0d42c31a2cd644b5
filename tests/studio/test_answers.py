"""The answers of the planning page without a browser: its state, predictions, faults, files, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the planning page takes shardwright[studio]")
pytest.importorskip("httpx2", reason="its tests take httpx2")

from starlette.testclient import TestClient

from shardwright.api.asked_job import AskedJob
from shardwright.api.estimated import Estimated
from shardwright.config import catalog
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.load import load_job, validate_fields
from shardwright.interchange.system import SYSTEMS
from shardwright.memory.job_memories import job_accounts
from shardwright.memory.job_memory import job_memory
from shardwright.report.plan_parts import PARTS, PredictedPlan
from shardwright.studio import page_state
from shardwright.studio.controls import control_groups, on_page
from shardwright.studio.exports import FORMATS
from shardwright.studio.page_state import PageState
from shardwright.studio.plan_search import changed_texts
from shardwright.studio.studio_server import application, listening, page_files
from support.languages import num_chinese
from support.tiny_config import TINY_LLAMA

ADDRESS = "http://127.0.0.1:8765"
HEADERS = {"Origin": ADDRESS, "Sec-Fetch-Site": "same-origin"}
MEGATRON = """
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \\
  --seq-length 2048 --max-position-embeddings 2048 --vocab-size 51200 --micro-batch-size 2 --global-batch-size 256 \\
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --train-iters 100 --lr 1e-4 --bf16 \\
  --tokenizer-type NullTokenizer --mock-data
"""


@pytest.fixture(scope="module")
def page() -> TestClient:
    return TestClient(application(8765), base_url=ADDRESS, headers=HEADERS)  # without its second process


def test_a_page_in_chinese_has_its_controls_faults_and_legends_in_it() -> None:
    page = TestClient(application(8765, language="zh"), base_url=ADDRESS, headers=HEADERS)
    index = page.get("/").text
    assert '<html lang="zh">' in index and '"Best plan":"\\u6700\\u4f73\\u65b9\\u6848"' in index
    assert list(page.get("/controls").json()["groups"]) == ["模型", "集群", "并行度", "策略"]
    state = {"job": "quickstart", "device": "h100-sxm", "devices": "4"}
    parts = parts_of(page, state)
    assert "流水线" in json.dumps(parts["timeline"], ensure_ascii=False) or "前向" in parts["timeline"]["legend"]
    assert parts["memory"]["verdict"].startswith("放得进") and parts["timeline"]["data"]["words"]["play"] == "播放"
    (fault,) = parts_of(page, state | {"plan.tp": "3", "plan.dp": "1"}, "values", "step")["faults"]["faults"][:1]
    assert num_chinese(fault) > 5


def parts_of(page: TestClient, state: dict[str, str], *wanted: str) -> dict[str, Any]:
    """The parts of an answer by name."""
    answer = page.post("/plan", json={"state": state, "wanted": ",".join(wanted or ("values", *PARTS))})
    assert answer.status_code == 200, answer.text
    return {part["part"]: part for part in map(json.loads, answer.text.splitlines())}


@pytest.mark.parametrize(
    ("state", "overrides"),
    [
        ({"job": "quickstart"}, ()),
        ({"job": "quickstart-moe", "plan.microbatch_size": "1"}, ("plan.microbatch_size=1",)),
        ({"job": "gpt3-175b-1024", "plan.tp": "4"}, ("plan.tp=4", "plan.dp=16")),
        ({"job": "gpt3-175b-1024", "plan.schedule": "zb-h1"}, ("plan.schedule=zb-h1",)),
    ],
)
def test_figures_are_those_of_estimate(page: TestClient, state: dict[str, str], overrides: tuple[str, ...]) -> None:
    job = load_job(state["job"], overrides)
    expected, parts = Estimated(job).to_dict(), parts_of(page, state, "values", "job", "step", "memory")
    assert list(parts) == ["values", "job", "step", "memory"]
    memory = parts["memory"]
    kinds = expected["memory"][0].keys()
    assert [{kind: rank[kind] for kind in kinds} for rank in memory["ranks"]] == expected["memory"]
    assert memory["fits"] == expected["fits"]
    assert parts["job"]["parameters"] == expected["parameters"] and parts["job"]["ranks"] == job.plan.world
    assert parts["values"]["values"]["plan.dp"] == job.plan.dp
    if "step_s" in expected:
        assert max(rank["process_bytes"] for rank in memory["ranks"]) == pytest.approx(expected["process_bytes"], abs=1)
        room = memory["offered_bytes"] - memory["ranks"][0]["overhead_bytes"]
        assert room == expected["device_room_bytes"]
        assert {name: parts["step"][name] for name in ("step_s", "mfu", "time", "money")} == {
            name: expected[name] for name in ("step_s", "mfu", "time", "money")
        }
    else:
        assert parts["step"]["untimed"]


@pytest.mark.parametrize("name", ["gpt3-175b-1024", "llama3-405b-16k", "deepseek-v3", "quickstart-moe"])
def test_accounts_that_are_shared_are_those_of_the_whole_job(name: str) -> None:
    job = load_job(name)
    assert job_accounts(job) == job_memory(job)


def test_timeline_and_links_are_those_of_the_plan(page: TestClient) -> None:
    parts = parts_of(page, {"job": "gpt-100b-32xa100"}, "job", "step", "timeline", "links")
    (section,) = parts["timeline"]["data"]["sections"]
    plan = load_job("gpt-100b-32xa100").plan
    assert section["tail"][-1][1] == pytest.approx(parts["step"]["step_s"])
    assert parts["timeline"]["axes"] == {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp}
    assert section["num_ranks"] == plan.pp
    assert 0 < section["makespan"] <= parts["step"]["step_s"]
    assert len(parts["links"]["places"]) == parts["job"]["ranks"] == plan.world
    assert parts["links"]["axes"] == {
        axis: size for axis, size in (("pp", plan.pp), ("dp", plan.dp), ("cp", plan.cp), ("tp", plan.tp)) if size > 1
    }


def test_a_step_of_very_many_actions_is_neither_drawn_nor_timed(
    page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def played(*arguments: object) -> None:
        raise AssertionError("the times of the actions were computed")

    monkeypatch.setattr("shardwright.report.timeline.step_drawing.play", played)
    monkeypatch.setattr("shardwright.report.plan_parts._MOST_DRAWN", 3)
    assert "a page draws at most 3" in parts_of(page, {"job": "quickstart-gpt"}, "timeline")["timeline"]["undrawn"]


@pytest.mark.parametrize(
    "fields",
    [
        {"plan.tp": "3", "plan.dp": "8"},
        {"plan.tp": "many"},
        {"plan.schedule": "1f1", "plan.dp": "8"},
        {"cluster.device": "h1000", "plan.dp": "8"},
        {"plan.pp": "7", "plan.dp": "8"},
    ],
)
def test_faults_are_those_of_the_commands(page: TestClient, fields: dict[str, str]) -> None:
    with pytest.raises(PlanError) as raised:
        AskedJob("gpt3-175b-1024", tuple(f"{key}={text}" for key, text in fields.items())).as_planned()
    answer = page.post("/plan", json={"state": {"job": "gpt3-175b-1024"} | fields, "wanted": "values,job,step"})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    faults = lines[0]["faults"] if answer.status_code == 422 else lines[-1]["faults"]
    if "cluster.device" in fields:  # a page names entries of the catalog alone
        assert re.search(r"h1000.*catalog of devices", faults[0])
    else:
        assert faults == raised.value.faults


def test_memory_of_other_software_is_that_of_its_processes(page: TestClient) -> None:
    memory = parts_of(page, {"job": "gpt3-175b-1024", "cluster.software": "megatron-core"}, "memory")["memory"]
    expected = Estimated(load_job("gpt3-175b-1024", ("cluster.software=megatron-core",))).to_dict()
    assert max(rank["process_bytes"] for rank in memory["ranks"]) == pytest.approx(expected["process_bytes"], abs=1)
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "working", "overhead")
    for rank in memory["ranks"]:
        assert sum(rank[f"{kind}_bytes"] for kind in kinds) == pytest.approx(rank["process_bytes"], abs=len(kinds))


def test_a_device_may_have_other_memory(page: TestClient) -> None:
    state = {"job": "gpt3-175b-1024", "memory_gib": "24"}
    parts = parts_of(page, state, "values", "step", "memory")
    assert parts["memory"]["fits"] is False and parts["memory"]["offered_bytes"] < 24 * 2**30
    values = parts["values"]["values"]
    assert (values["device"], values["memory_gib"]) == ("a100-sxm-80g", 24)
    assert parts["step"]["step_s"] == parts_of(page, {"job": "gpt3-175b-1024"}, "step")["step"]["step_s"]
    for wrong in ("0.0", "many", "1e99", "-3", "1_0", "nan"):
        parts = parts_of(page, state | {"memory_gib": wrong}, "values") if wrong == "0.0" else {}
        faults = page.post("/plan", json={"state": state | {"memory_gib": wrong}, "wanted": "job"}).text
        assert parts or "use a number of GiB" in faults, wrong


def test_what_prices_do_not_change_is_not_made_nor_sent_again(page: TestClient) -> None:
    state = {"job": "quickstart", "device": "h100-sxm", "devices": "4"}
    wanted = ("step", "memory", "links", "timeline")
    first = parts_of(page, state, *wanted)
    changes = {"usd_per_device_hour": "7", "pue": "1.3", "restart_s": "60", "hours_between_failures": "1000"}
    priced = state | {f"cluster.{name}": text for name, text in changes.items()}
    second = parts_of(page, priced, *wanted)
    assert second["step"]["money"] != first["step"]["money"] and second["step"]["step_s"] == first["step"]["step_s"]
    for name in wanted[1:]:
        assert second[name] == first[name]
        apart = PARTS[name](PredictedPlan(PageState(priced).job()))
        assert json.loads(json.dumps(apart)) == {
            key: one for key, one in first[name].items() if key not in ("part", "key")
        }
    known = {name: first[name]["key"] for name in wanted[1:]}
    question = {"state": priced, "wanted": ",".join(wanted), "known": known}
    lines = [json.loads(line) for line in page.post("/plan", json=question).text.splitlines()]
    assert lines[1:] == [{"part": name, "key": known[name]} for name in wanted[1:]]
    larger = parts_of(page, state | {"cluster.intra_node.bandwidth_gb_per_s": "100"}, *wanted)
    assert all(larger[name]["key"] != first[name]["key"] for name in known)


def test_replicas_fill_the_cluster_unless_they_are_set() -> None:
    assert PageState({"job": "gpt3-175b-1024", "plan.tp": "2"}).job().plan.dp == 32
    assert PageState({"job": "gpt3-175b-1024", "devices": "256"}).job().plan.dp == 2
    with pytest.raises(PlanError, match="use dp 32"):
        PageState({"job": "gpt3-175b-1024", "plan.tp": "2", "plan.dp": "8"}).job()


def test_a_state_is_predicted_once(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    state, calls = {"job": "quickstart-gpt", "plan.bucket_mib": "3"}, []
    make_job = PageState.job
    monkeypatch.setattr(PageState, "job", lambda self: calls.append(self) or make_job(self))
    first = parts_of(page, state, "job", "step", "memory")
    assert parts_of(page, dict(reversed(state.items())), "job", "step", "memory") == first
    assert "timeline" in parts_of(page, state, "timeline") and len(calls) == 1


def test_a_question_with_many_fields_lists_those_of_a_job_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, list_fields = [], page_state.job_fields
    monkeypatch.setattr(page_state, "job_fields", lambda: calls.append(None) or list_fields())
    page_state._field_names.cache_clear()
    for number in range(3):
        PageState.read(
            {"plan.tp": "2", "plan.pp": "4", "model.sequence": "4096", "optimizer.warmup_steps": str(number)}
        )
    assert len(calls) == 1


def test_numbers_of_the_cluster_are_faults_of_one_list() -> None:
    with pytest.raises(PlanError) as caught:
        PageState.read({"job": "no-such", "devices": "many", "devices_per_node": "-1", "memory_gib": "nan"})
    words = ("'no-such'", "devices is 'many'", "devices_per_node is '-1'", "memory_gib is 'nan'")
    assert all(word in fault for word, fault in zip(words, caught.value.faults, strict=True))


@pytest.mark.parametrize(
    "state",
    [
        {"job": "/etc/passwd"},
        {"job": "tests/fuzz/draw.py"},
        {"job": "quickstart", "model.name": "/etc"},
        {"job": "quickstart", "model.name": '"/etc"'},
        {"job": "quickstart", "cluster.software": "../x.toml"},
        {"job": "quickstart", "device": "/etc/passwd"},
        {"job": "quickstart", "model.weights": "/etc/passwd"},
        {"job": "quickstart", "model.adapter.weights": "/etc"},
        {"job": "quickstart", "data.path": "/etc/passwd"},
        {"job": "quickstart", "run.folder": "/tmp/x"},
        {"job": "quickstart", "plan.tp": "1\ndata.path=/etc/passwd"},
        {"job": "quickstart", "plan.tp": "1" * 5000},
        {"job": "quickstart", "devices": "1e3"},
        {"job": "quickstart", "plan.tp": 1},
        {str(number): "" for number in range(400)},
        [],
        None,
    ],
)
def test_a_page_names_the_catalog_and_nothing_else(
    page: TestClient, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{path} was read")

    for name in ("stat", "open", "read_text", "read_bytes", "is_file", "is_dir", "exists"):
        monkeypatch.setattr(Path, name, refuse)
    answer = page.post("/plan", json={"state": state, "wanted": "job"})
    faults = [json.loads(line) for line in answer.text.splitlines()][-1]["faults"]
    assert faults and all(fault == fault.strip() for fault in faults)


def test_only_the_page_itself_is_answered(page: TestClient) -> None:
    question = {"state": {"job": "quickstart"}, "wanted": "job"}
    assert page.post("/plan", json=question).status_code == 200
    for refused in (
        {"Host": "evil.example:8765"},
        {"Host": "127.0.0.1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert page.post("/plan", json=question, headers=refused).status_code == 403, refused
    text = json.dumps(question)
    assert page.post("/plan", content=text, headers={"Content-Type": "text/plain"}).status_code == 403
    assert page.get("/", headers={"Host": "evil.example:8765"}).status_code == 403
    assert page.get("/plan").status_code == 405 and page.get("/page/../../x").status_code == 404


@pytest.mark.parametrize("path", ["/plan", "/search", "/drop", "/export"])
def test_bodies_are_bounded_json_objects(page: TestClient, path: str) -> None:
    for body in (b"", b"[1]", b"{" * 100_000, b'"x"', b'{"x": "' + b"y" * 2**20 + b'"}', b"\xff"):
        answer = page.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422 and len(answer.json()["faults"]) == 1, body[:9]


def test_nothing_is_loaded_from_elsewhere(page: TestClient) -> None:
    index = page.get("/")
    assert "default-src 'none'" in index.headers["content-security-policy"]
    assert index.headers["content-type"].startswith("text/html")
    for name, content in page_files().items():
        assert not re.search(r"https?://|//cdn|@import|eval\(", content.decode()), name
        if name != "index.html":
            assert page.get(f"/page/{name}").content == content
    named = re.findall(r'(?:src|href)="(/[^"]*)"', index.text)
    modules = re.findall(r'from "\./([^"]*)"', "".join(text.decode() for text in page_files().values()))
    for path in (*named, *(f"/page/{module}" for module in modules)):
        assert page.get(path).status_code == 200, path


def test_a_socket_is_of_this_machine_alone() -> None:
    with listening(0) as connection:
        address, port = connection.getsockname()
        assert address == "127.0.0.1"
        connection.listen()
        with pytest.raises(PlanError, match="use another, or 0 for any free one"):
            listening(port)


def test_an_address_without_a_state_begins_with_the_job_that_was_asked_for(page: TestClient) -> None:
    assert page.get("/controls").json()["first"] == {"job": "gpt3-175b-1024"}
    asked = TestClient(application(8765, {"job": "quickstart"}), base_url=ADDRESS, headers=HEADERS)
    assert asked.get("/controls").json()["first"] == {"job": "quickstart"}


def test_every_control_sets_a_field(page: TestClient) -> None:
    described = page.get("/controls").json()
    assert described["jobs"] == catalog.names("jobs") and set(described["systems"]) == set(SYSTEMS)
    values = parts_of(page, {"job": "gpt3-175b-1024"}, "values")["values"]["values"]
    for control in (control for group in control_groups().values() for control in group):
        assert control.key in values
        if control.kind == "choice":
            assert str(values[control.key]) in control.choices
        state = PageState.read({"job": "gpt3-175b-1024", control.key: str(values[control.key]).lower()})
        assert state.job().plan == load_job("gpt3-175b-1024").plan


def test_fields_of_a_found_plan_make_that_plan() -> None:
    base = PageState({"job": "gpt3-175b-1024", "plan.tp": "2", "plan.zero": "1", "model.sequence": "1024"})
    overrides = ("model.sequence=1024", "plan.tp=4", "plan.dp=16", "plan.recompute=none", "plan.zero=2")
    wanted = load_job("gpt3-175b-1024", overrides)
    spec, _ = validate_fields(base.without_plan().fields)
    texts = changed_texts(spec, wanted)
    assert texts == {"plan.tp": "4", "plan.dp": "16", "plan.recompute": "none", "plan.zero": "2"}
    assert PageState({**base.without_plan().texts, **texts}).job().plan == wanted.plan


def lines_of(answer: dict[str, Any]) -> str:
    """The notes on dropped files, one behind the other."""
    return "\n".join(line for group in answer["notes"] for line in group["lines"])


def dropped(page: TestClient, files: dict[str, str], state: dict[str, str], system: str = "") -> Any:
    return page.post("/drop", json={"files": files, "system": system, "state": state}).json()


def test_a_dropped_config_is_a_model_on_the_cluster_of_the_page(page: TestClient) -> None:
    cluster = {"device": "h100-sxm", "devices": "16"}
    answer = dropped(page, {"config.json": json.dumps(TINY_LLAMA)}, cluster)
    state = answer["state"]
    assert (state["model.hidden"], state["model.layers"], state["devices"]) == ("64", "4", "16")
    assert "a step has" in lines_of(answer) and int(state["batch.global_batch_size"]) % 16 == 0
    assert "--set" not in lines_of(answer) and "the control Batch for another" in lines_of(answer)
    parts = parts_of(page, state)
    assert parts["job"]["ranks"] == 16 and parts["step"]["step_s"] > 0
    faults = dropped(page, {"config.json": json.dumps(TINY_LLAMA | {"model_type": "unheard-of"})}, cluster)["faults"]
    assert "unheard-of" in faults[0] and "/tmp" not in faults[0]
    assert dropped(page, {"config.json": "{"}, cluster)["faults"]


def test_a_dropped_script_is_the_job_that_import_reads(page: TestClient) -> None:
    answer = dropped(page, {"../../run.sh": MEGATRON}, {"device": "a100-sxm-80g", "devices": "32"})
    assert answer["system"] == "Megatron-LM" and "default" in lines_of(answer)
    job = PageState(answer["state"]).job()
    assert (job.plan.tp, job.plan.pp, job.plan.dp, job.model.hidden) == (4, 2, 4, 2048)
    assert parts_of(page, answer["state"], "step")["step"]["step_s"] > 0
    too_few = dropped(page, {"run.sh": MEGATRON.replace("--nnodes 4", "--nnodes $N")}, {"devices": "4"})
    assert "with --devices" in too_few["faults"][0] and "below Cluster" in too_few["way_out"]
    unknown = MEGATRON.replace("--bf16", "--bf16 --unheard-of 3")
    told = dropped(page, {"run.sh": unknown}, {"device": "a100-sxm-80g", "devices": "32"})
    assert "unheard-of" in lines_of(told) and "--as NAME" not in lines_of(told)
    folded = [group["heading"] for group in told["notes"] if group["folded"]]
    assert folded == ["Not read, for it does not change the plan:"]


@pytest.mark.parametrize(
    ("names", "title", "dp"),
    [(("axolotl.yaml", "config.json"), "axolotl", 8), (("neox.yml", "neox-data.yml"), "GPT-NeoX", 4),
     (("picotron.json", "config.json"), "picotron", 2)],
)  # fmt: skip
def test_a_dropped_configuration_is_of_the_system_that_import_recognises(
    page: TestClient, names: tuple[str, ...], title: str, dp: int
) -> None:
    folder = Path(__file__).parents[1] / "interchange" / "other_trainers"
    files = {name: (folder / name).read_text(encoding="utf-8") for name in names}
    answer = dropped(page, files, {"device": "h100-sxm", "devices": "16"})
    assert answer.get("system") == title, answer
    assert PageState(answer["state"]).job().plan.dp == dp


def test_a_dropped_job_is_what_was_exported(page: TestClient) -> None:
    state = {"job": "gpt3-175b-1024", "plan.tp": "4", "plan.zero": "1"}
    ((name, text),) = page.post("/export", json={"state": state, "to": "toml"}).json()["files"].items()
    answer = dropped(page, {name: text}, {})
    assert PageState(answer["state"]).job().plan == PageState(state).job().plan
    assert "optimizer" not in lines_of(answer)
    assert dropped(page, {"x.toml": "a = "}, {})["faults"][0].startswith("x.toml is not valid TOML: ")
    assert "drop one, such as a script" in dropped(page, {"x.exe": ""}, {})["faults"][0]
    assert "x.sh" not in dropped(page, {"x.sh": ""}, {}, system="nothing")["faults"][0]
    assert dropped(page, {}, {})["faults"] and dropped(page, {f"{n}.sh": "" for n in range(9)}, {})["faults"]


def test_a_plan_is_exported_to_every_format(page: TestClient) -> None:
    state = {"job": "quickstart", "device": "h100-sxm", "devices": "4"}
    for to in FORMATS:
        ((name, text),) = page.post("/export", json={"state": state, "to": to}).json()["files"].items()
        assert name.startswith("quickstart") and len(text) > 300
    assert "no format" in page.post("/export", json={"state": state, "to": "../x"}).json()["faults"][0]
    state = {"job": "llama3-8b", "device": "h100-sxm", "devices": "8", "plan.zero": "2", "plan.microbatch_size": "1"}
    for to in SYSTEMS:
        stage = {"plan.zero": "1"} if to == "nanotron" else {}  # which shards no gradients
        assert page.post("/export", json={"state": state | stage, "to": to}).json()["files"]
    lacking = page.post("/export", json={"state": {"job": "llama3-405b-16k"}, "to": "megatron"}).json()
    assert (
        "the nearest is 1" in lacking["faults"][0]
        and "ZeRO: 1" in lacking["way_out"]
        and "--set" not in lacking["way_out"]
    )


@pytest.mark.parametrize("language", ["en", "zh"])
def test_notes_of_the_page_name_controls_and_no_options(language: str) -> None:
    asked = AskedJob("llama3-8b", ("optimizer.steps=10",), AskedCluster(8, "h100-sxm"))
    told = [on_page(note, language) for note in asked.notes]
    assert any("--set" in note for note in asked.notes) and not any("--set" in note for note in told)
    control = {"en": "the control Batch for another", "zh": "可用 “批次”一栏修改"}[language]
    assert any(control in note for note in told), told
    assert any("optimizer.warmup_steps" in note for note in told), told
