"""Timelines explain every moment, and each way to show them shows all of it."""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cli.main import cli, main
from shardwright.config.base import PlanError
from shardwright.config.load import load_job
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.units import bytes_text
from shardwright.report.timeline.page import section_of, timeline_page
from shardwright.report.timeline.picture import picture
from shardwright.report.timeline.schedule_figures import memory_table
from shardwright.report.timeline.study import Study, readable, study_schedule
from shardwright.report.timeline.terminal import draw
from shardwright.report.timeline.trace import trace
from shardwright.schedule.action import Kind
from shardwright.schedule.buffer_lifetimes import Buffer, peak_activations
from shardwright.schedule.job_program import job_program, relative_costs
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.schedule import Program
from shardwright.schedule.timing import Costs, play
from shardwright.simulate.bubbles import Work
from shardwright.simulate.timeline import Idle, Resource, make_timeline
from shardwright.simulate.waits import Cause
from support.languages import assert_same_in_chinese, words_of_picture
from support.packed_columns import unpacked_column, unpacked_ranks
from support.programs import schedule_faults, training_program

SHAPES = [(p, m) for p in (1, 2, 3, 4) for m in (1, 3, 8)]
WHOLE = {"makespan", "idle", "memory", "gathers", "reductions", "bytes"}  # what is added where one is looked at
COMPARED = {
    "name", "bubble", "span_bubble", "period_bubble", "bubble_fraction", "peak_activations", "parameter_copies",
    "messages",
}  # fmt: skip

# Eighths add up without rounding, so that what must be equal can be compared exactly.
eighths = st.integers(0, 24).map(lambda n: n / 8)


def virtual(name: str) -> int:
    """The number of stages a rank that the commands take where the user may choose it."""
    return 2 if SCHEDULES[name].stages_per_rank == 0 else 1


def study(name: str, num_ranks: int = 4, num_microbatches: int = 8, latency: float = 0.0, num_steps: int = 1) -> Study:
    shape = PipelineShape(num_ranks, num_microbatches, virtual(name), num_steps=num_steps)
    return study_schedule(name, shape, Work(latency=latency))


@st.composite
def programs(pick: st.DrawFn) -> Program:
    admitted = [
        (name, p, m) for name in SCHEDULES for p, m in SHAPES if not schedule_faults(name, p, m, virtual(name))
    ]  # fmt: skip
    name, p, m = pick(st.sampled_from(admitted))
    return training_program(name, p, m, virtual(name))


@settings(max_examples=150, deadline=None)
@given(program=programs(), num_steps=st.integers(1, 3), pick=st.data())
def test_every_moment_of_a_rank_is_explained(program: Program, num_steps: int, pick: st.DataObject) -> None:
    def costs() -> tuple[float, ...]:
        return tuple(pick.draw(st.lists(eighths, min_size=program.num_stages, max_size=program.num_stages)))

    times = play(
        program, Costs(costs(), costs(), costs(), costs(), pick.draw(eighths), 1.0, costs(), pick.draw(eighths)),
        num_steps,
    )  # fmt: skip
    timeline = make_timeline(program, times)
    assert all(row.num_steps == num_steps for row in timeline.ranks)
    for rank, row in enumerate(timeline.ranks):
        assert row.busy + sum(row.idle_by_cause().values()) == times.makespan
        busy = [(s.start, s.end) for s in row.spans if s.resource is Resource.COMPUTE and s.end > s.start]
        pieces = sorted(busy + [(gap.start, gap.end) for gap in row.idle])
        borders = [0.0, *(end for _, end in pieces)]
        assert [start for start, _ in pieces] == borders[:-1]
        assert borders[-1] == times.makespan
        assert max(count for _, count in row.kept[Buffer.ACTIVATIONS].count) == peak_activations(program)[rank]
        assert row.kept[Buffer.ACTIVATIONS].count[-1][1] == 0
        assert all(count >= 0 for _, count in row.kept[Buffer.ACTIVATIONS].count + row.kept[Buffer.MESSAGE].count)
        assert not row.kept[Buffer.MESSAGE].count or row.kept[Buffer.MESSAGE].count[-1][1] == 0


def test_causes_of_one_microbatch_through_two_ranks() -> None:
    program = training_program("1f1b", 2, 1)
    timeline = make_timeline(program, play(program, Costs.uniform(2, latency=0.5)))
    first, last = timeline.ranks
    assert first.idle == (Idle(Cause.DEPENDENCY, 1.0, 4.5), Idle(Cause.COMMUNICATION, 4.5, 5.0))
    assert last.idle == (Idle(Cause.WARM_UP, 0.0, 1.5), Idle(Cause.DRAIN, 4.5, 7.0))
    assert first.kept[Buffer.ACTIVATIONS].count == ((0.0, 1), (7.0, 0))
    assert first.kept[Buffer.MESSAGE].count == last.kept[Buffer.MESSAGE].count == ()


def test_a_buffer_is_full_from_arrival_to_use() -> None:
    """1F1B on two ranks: the second microbatch is there at 2, and rank 1 takes it at 4, after F0 and B0."""
    program = training_program("1f1b", 2, 2)
    second = make_timeline(program, play(program, Costs.uniform(2))).ranks[1]
    assert second.kept[Buffer.MESSAGE].count == ((2.0, 1), (4.0, 0))


def test_between_steps_ranks_drain_until_the_last_has_ended_and_then_warm_up() -> None:
    program = training_program("gpipe", 2, 1)
    last = make_timeline(program, play(program, Costs.uniform(2), num_steps=2)).ranks[1]
    assert last.idle == (
        Idle(Cause.WARM_UP, 0.0, 1.0),
        Idle(Cause.DRAIN, 4.0, 6.0),
        Idle(Cause.WARM_UP, 6.0, 7.0),
        Idle(Cause.DRAIN, 10.0, 12.0),
    )


def test_the_optimizer_waits_for_the_reduction() -> None:
    program = training_program("1f1b", 1, 1)
    one = make_timeline(program, play(program, Costs((1.0,), (1.0,), (1.0,), reduce=(0.5,), step=0.25))).ranks[0]
    assert one.busy == 3.25
    assert one.idle == (Idle(Cause.COMMUNICATION, 3.0, 3.5),)


def test_free_messages_are_never_waited_for() -> None:
    for name in SCHEDULES:
        for row in study(name).timeline.ranks:
            assert row.idle_by_cause()[Cause.COMMUNICATION] == 0


def test_drawing_of_1f1b() -> None:
    assert draw(study("1f1b", 4, 4).timeline, width=80).splitlines() == [
        "rank 0 |F0|F1|F2|F3 .................|B0    ..|B1    ..|B2    ..|B3",
        "rank 1    |F0|F1|F2 ...........|B0   |F3|B1    ..|B2    ..|B3",
        "rank 2       |F0|F1 .....|B0   |F2|B1   |F3|B2    ..|B3",
        "rank 3          |F0|B0   |F1|B1   |F2|B2   |F3|B3",
        "time   0              5              10             15             20",
        "",
        "F forward   B backward",
        ". another rank has yet to compute",
    ]


@pytest.mark.parametrize("name", SCHEDULES.names)
@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_drawings_fit(name: str, width: int, latency: float) -> None:
    timeline = study(name, latency=latency).timeline
    plain = draw(timeline, width)
    rows = plain.splitlines()[: len(timeline.ranks)]
    assert max(map(len, rows)) <= width
    assert plain.isascii()
    letters = {str(part.kind) for row in timeline.ranks for span in row.spans for part in span.action.computes()}
    assert {letter.upper() for letter in re.findall("[FBIWfbiw]", "".join(rows))} == letters
    for palette in ("256", "truecolor"):
        coloured = draw(timeline, width, palette).splitlines()  # type: ignore[arg-type]
        shown = [re.sub(r"\x1b\[[\d;]*m", "", row) for row in coloured[: len(rows)]]
        assert max(map(len, shown)) <= width
        assert all(row.count("\x1b[") > 2 and row.endswith("\x1b[0m") for row in coloured[: len(rows)])


@pytest.mark.parametrize("name", SCHEDULES.names)
def test_trace_holds_every_action(name: str) -> None:
    one = study(name, latency=0.4, num_steps=2)
    events = json.loads(json.dumps(trace(one.timeline, name)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(len(row.spans) for row in one.timeline.ranks)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(1000 * one.timeline.makespan)
    sends = sum(
        span.action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD) for r in one.timeline.ranks for span in r.spans
    )
    for phase in "sf":
        assert sorted(event["id"] for event in events if event["ph"] == phase) == list(range(sends))
    last: dict[tuple[int, int], float] = {}
    for event in slices:  # slices of a thread follow each other
        place = event["pid"], event["tid"]
        assert event["ts"] >= last.get(place, 0.0) - 1e-6
        last[place] = event["ts"] + event["dur"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(last)


class Page(HTMLParser):
    """Checks that elements close in order; keeps text, links and the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.data = ""
        self._in_data = False
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]
        self._in_data = named.get("id") == "data"
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._in_data = False

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        self.data += data if self._in_data else ""


def test_page_is_whole_and_needs_nothing_else() -> None:
    studies = [study(name, latency=0.25) for name in SCHEDULES]
    text = timeline_page("A < B & C", [section_of(one) for one in studies], "note", studies)
    page = Page(text)
    assert "A < B & C" in page.words
    assert {f"rank {rank}" for rank in range(4)} <= set(page.words)
    assert set(SCHEDULES) <= set(page.words)
    assert page.links == [f"#s{number}" for number in range(len(studies))]
    assert not re.search(r"https?://", text.replace("http://www.w3.org/2000/svg", ""))
    assert "@import" not in text and "url(" not in text
    sections = json.loads(page.data)["sections"]
    for one, section in zip(studies, sections, strict=True):
        computes = [sum(bool(span.action.computes()) for span in row.spans) for row in one.timeline.ranks]
        assert [len(row["busy"]["from"]) for row in unpacked_ranks(section)] == computes
        assert len(unpacked_column(section["messages"]["from"])) == one.bubbles.messages


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_the_picture_has_the_same_numbers_in_chinese(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = study(name).timeline
    assert_same_in_chinese(lambda language: words_of_picture(picture(drawn, name, language=language)), monkeypatch, 100)


@pytest.mark.parametrize("name", SCHEDULES.names)
def test_picture_is_an_svg_with_every_computation(name: str) -> None:
    one = study(name)
    root = ElementTree.fromstring(picture(one.timeline, name))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    parts = sum(len(span.action.computes()) for row in one.timeline.ranks for span in row.spans)
    assert len(titles) == 1 + parts


@pytest.mark.parametrize("name", SCHEDULES.names)
def test_formula_is_the_bubble(name: str) -> None:
    one = study(name)
    if one.formula is not None:
        assert one.formula.value == pytest.approx(one.bubbles.bubble)


def test_formulas_read_like_a_book() -> None:
    assert readable("(p / 2 - 1) * (FB + B - 3 * W)") == "(p / 2 - 1)(FB + B - 3W)"
    assert readable("m * (p - 1) * (F + B)") == "m(p - 1)(F + B)"
    assert readable("(p - 1) * F / 2") == "(p - 1)F / 2"


@pytest.mark.parametrize("model", [ModelSpec(), ModelSpec(layers=6, kv_heads=2, gated_mlp=False, vocab=1000)])
def test_stages_together_cost_what_the_model_does(model: ModelSpec) -> None:
    layers = [1, model.layers - 3, 2]
    flops = shape_of(model).stage_flops(layers, 5)
    assert 3 * sum(flops) == shape_of(model).flops_per_token() * 5 * model.sequence
    assert flops[1] == flops[0] * layers[1]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command in this process, with each sentence in one line."""
    monkeypatch.setenv("COLUMNS", "10000")
    monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def sharded(name: str = "looped-bfs", gather: float = 0.5) -> Study:
    return study_schedule(
        name, PipelineShape(2, 4, virtual(name)), Work(gather=gather), recompute="stage", gathers=True
    )


def test_drawing_of_gathers_and_recompute() -> None:
    """A gather stands under the computation that it travels under, a release in the last column of its stage's run."""
    one = study_schedule("looped-bfs", PipelineShape(2, 2, 2), Work(gather=0.5), recompute="stage", gathers=True)
    assert draw(one.timeline, width=100).splitlines()[:5] == [
        "rank 0   |F0 |F1 |f0 |f1 |c0  ...........|b0     |c1 |b1     |C0 |B0     |C1 |B1      ~",
        "       G0    G2 L                                    G0     LR2                     LR0",
        "rank 1       |F0 |F1 |f0 |f1 |c0 |b0     |c1 |b1     |C0 |B0     |C1 |B1      ~",
        "       G1        G3 L                        G1     LR3                     LR1",
        "time   0       1       2       3       4       5       6       7       8       9       10",
    ]


@pytest.mark.parametrize("gather", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("name", ["1f1b", "looped-bfs", "interleaved-1f1b", "zb-v", "dualpipev"])
def test_gathers_are_shown_everywhere(name: str, gather: float) -> None:
    one = sharded(name, gather)
    spans = [span for row in one.timeline.ranks for span in row.spans]
    moves = [span for span in spans if span.action.kind in (Kind.GATHER, Kind.REDUCE, Kind.RELEASE)]
    for palette in ("none", "256"):
        lines = draw(one.timeline, 120, palette).splitlines()  # type: ignore[arg-type]
        plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
        assert [line.startswith("rank") for line in plain[:5]] == [True, False, True, False, False]
        assert max(map(len, plain[:4])) <= 121
        assert all("G" in line and set(line) <= set("GRL0123|- ") for line in plain[1:4:2])
    root = ElementTree.fromstring(picture(one.timeline, name))
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(" of stage " in title for title in titles) == len(moves)
    texts = [text for text in root.findall("{http://www.w3.org/2000/svg}text") if text.get("font-size") == "11.5"]
    assert texts and all(float(text.get("x", 0)) + 6.6 * len(text.text or "") <= 1120 for text in texts)
    assert max(float(text.get("y", 0)) for text in texts) < float(root.get("height", 0))
    page = Page(timeline_page(name, [section_of(one)]))
    ranks = unpacked_ranks(json.loads(page.data)["sections"][0])
    assert sum(len(row["moves"]["from"]) for row in ranks) == len(moves)
    assert all(row["gathered"]["at"] for row in ranks) and any(row["inputs"]["at"] for row in ranks)
    assert {"gather parameters", "forward again", "stage inputs kept"} <= set(page.words)
    events = trace(one.timeline, name)["traceEvents"]
    named = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    assert {(rank, lane) for rank in (0, 1) for lane in ("collectives", "release")} <= named
    assert {"gather parameters", "reduce gradients", "release parameters", "forward again"} <= {
        event["cat"] for event in events if event["ph"] == "X"
    }
    assert {event["name"] for event in events if event["ph"] == "C"} >= {
        "stage inputs alive",
        "gathered parameters alive",
    }
    assert one.formula is None
    assert [row[0] for row in memory_table(one)] == ["most at once", "rank 0", "rank 1"]


def test_trace_of_a_job_says_bytes() -> None:
    job = load_job("quickstart")
    program = job_program(job)
    events = trace(make_timeline(program, play(program, relative_costs(job))), "quickstart")["traceEvents"]
    sends = [event for event in events if event["ph"] == "X" and event["cat"] == "send forward"]
    assert sends and all(event["args"]["bytes"] == program.sizes.message for event in sends)  # type: ignore[union-attr]
    assert any(event["name"] == "bytes of messages" for event in events)


def test_sizes_in_words() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 * 2**20, 2**50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3 MiB",
        "1024 TiB",
    ]


def test_gathers_and_recompute_by_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    arguments = ["schedule", "looped-bfs", "--stages", "2", "--microbatches", "4", "--gather", "0.5", "--recompute"]
    status, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    result = json.loads(out)
    assert status == 0
    assert (result["gathers"], result["reductions"]) == (2 * 3, 2 * 2)
    assert result["memory"][0]["gathered parameters"] == {"most": 2, "bytes": None}
    assert result["memory"][0]["stage inputs"]["most"] == 8
    status, out, _ = run(monkeypatch, capsys, *arguments)
    assert "reducing its gradients too" in " ".join(out.split()) and "gathered parameters" in out
    _, out, err = run(monkeypatch, capsys, "schedule", "--compare", "--gather", "0")
    assert "pipedream is left out: schedule 'pipedream' keeps older versions" in err + out


def test_compare_prints_exactly_the_fields(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    status, out, err = run(monkeypatch, capsys, "schedule", "--compare", "--json", "--microbatches", "6")
    result = json.loads(out)
    assert status == 0 and out.count("\n") == 1
    assert set(result) == {"schedules"}
    assert all(set(row) == COMPARED for row in result["schedules"])
    left_out = [name for name in SCHEDULES if schedule_faults(name, 4, 6, virtual(name))]
    assert [row["name"] for row in result["schedules"]] == [name for name in SCHEDULES if name not in left_out]
    assert [line.split()[0] for line in err.splitlines()] == left_out
    by_name = {row["name"]: row for row in result["schedules"]}
    assert by_name["1f1b"] == {
        "name": "1f1b", "bubble": 9.0, "span_bubble": 9.0, "period_bubble": 9.0, "bubble_fraction": round(9 / 27, 12),
        "peak_activations": [4, 3, 2, 1], "parameter_copies": 1, "messages": 36,
    }  # fmt: skip


def test_one_schedule_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(monkeypatch, capsys, "schedule", "zb-h1", "--json", "--communication", "0.5")
    result = json.loads(out)
    assert (status, err) == (0, "")
    assert set(result) == COMPARED | WHOLE
    assert result["bytes"] is None
    assert [set(row) for row in result["idle"]] == [{str(cause) for cause in Cause}] * 4
    assert all(sum(row.values()) == pytest.approx(result["bubble"]) for row in result["idle"])


def test_files_are_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("page.html", "picture.svg", "trace.json")]
    options = [
        word for name, file in zip(("html", "svg", "trace"), files, strict=True) for word in (f"--{name}", str(file))
    ]
    status, out, err = run(monkeypatch, capsys, "schedule", "dualpipe", "--steps", "2", *options)
    assert status == 0 and "rank 3" in out and "\x1b" not in out
    assert err.splitlines() == [f"wrote {file}" for file in files]
    Page(files[0].read_text())
    ElementTree.fromstring(files[1].read_text())
    assert json.loads(files[2].read_text())["traceEvents"]


def test_comparison_is_one_table_and_one_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "all.html"
    status, out, _ = run(monkeypatch, capsys, "schedule", "--compare", "--stages", "3", "--html", str(file))
    assert status == 0
    assert "dualpipe is left out: " in out
    assert {line.split()[0] for line in out.splitlines() if line} >= set(SCHEDULES)
    assert file.read_text().count("<canvas") == len(SCHEDULES) - 1


def test_job_is_drawn_in_units_of_its_mean_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    status, out, err = run(monkeypatch, capsys, "simulate", "quickstart", "--json")
    result = json.loads(out)
    job = load_job("quickstart")
    assert (status, err) == (0, "")
    idle = {"bubble", "bubble_fraction", "mean_idle", "idle_fraction", "span_idle", "period_idle"}
    others = COMPARED - {"span_bubble", "period_bubble"}
    assert set(result) == others | idle | WHOLE | {"job", "unit", "step_s"} and result["step_s"] is None
    messages = 2 * job.num_microbatches  # over one border, both ways
    hidden_state = 4 * job.model.hidden * job.plan.microbatch_size * job.model.sequence // job.plan.tp
    assert job.plan.sequence_parallel and (result["messages"], job.plan.pp) == (messages, 2)
    assert result["bytes"]["messages"] == messages * hidden_state
    assert result["bytes"]["gathers"] == result["gathers"] == 0
    assert result["bytes"]["reductions"] > 0
    assert [set(row) for row in result["memory"]] == [set(map(str, Buffer))] * 2
    assert result["memory"][1]["messages"] == {"most": 1, "bytes": hidden_state}
    assert result["memory"][0]["activations"] == {"most": 2, "bytes": None}
    assert result["makespan"] - result["mean_idle"] == pytest.approx(3 * job.num_microbatches)
    _, out, _ = run(monkeypatch, capsys, "simulate", "quickstart", "--set", "plan.schedule=zb-h1")
    assert "quickstart, zb-h1: 2 ranks, 4 microbatches" in out
    assert "Times are relative" in out


def test_job_on_a_known_device_is_drawn_in_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:  # fmt: skip
    """Stages, messages and collectives are in the step that is told; `--communication` is in units of a forward."""
    on_device = ["simulate", "quickstart", "--set", "cluster.device=h100-sxm"]
    file = tmp_path / "trace.json"
    _, out, _ = run(monkeypatch, capsys, *on_device, "--json", "--trace", str(file))
    result = json.loads(out)
    assert result["unit"] == "s" and 0 < result["makespan"] < result["step_s"]
    latest = max(
        event["ts"] + event.get("dur", 0) for event in json.loads(file.read_text())["traceEvents"] if "ts" in event
    )
    assert latest == pytest.approx(1e6 * result["makespan"], rel=1e-3)
    _, out, _ = run(monkeypatch, capsys, *on_device)
    assert "Times are seconds" in out and "as `estimate` says it" in " ".join(out.split())
    _, out, _ = run(monkeypatch, capsys, *on_device, "--communication", "1", "--json")
    relative = json.loads(out)
    assert relative["step_s"] == result["step_s"] and relative["unit"] != "s" and relative["makespan"] > 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["schedule"], "name a schedule, or use --compare; there are: sequential, gpipe"),
        (["schedule", "1f1"], "'1f1' is not a schedule; did you mean 1f1b?"),
        (["schedule", "1f1b", "--stages", "0"], "--stages is 0; use 1 or more"),
        (["schedule", "1f1b", "--steps", "0"], "--steps is 0"),
        (["schedule", "1f1b", "--virtual", "0"], "--virtual is 0"),
        (["schedule", "1f1b", "--virtual", "2"], "runs one stage on each rank"),
        (["schedule", "interleaved-1f1b", "--virtual", "1"], "use 2 or more"),
        (["schedule", "dualpipe", "--stages", "3"], "p 3 is odd"),
        (["schedule", "1f1b", "--gather", "-1"], "--gather is -1"),
        (["schedule", "pipedream", "--gather", "1"], "keeps older versions of the weights"),
        (["schedule", "1f1b", "--forward", "-1"], "--forward is -1"),
        (["schedule", "1f1b", "--slow", "4", "2"], "--slow names rank 4, and the ranks are 0 to 3"),
        (["schedule", "1f1b", "--slow", "0", "nan"], "--slow is nan times, and it must be from 1 to 1,000"),
        (["schedule", "dualpipe", "--slow", "0", "2"], "two ranks hold each stage"),
        (["schedule", "--compare", "--communication", "nan"], "--communication is nan"),
        (["schedule", "--compare", "--svg", "x.svg"], "--trace and --svg are of one schedule"),
        (["schedule", "1f1b", "--forward", "0", "--input-grad", "0", "--weight-grad", "0"], "nothing to draw"),
        (["schedule", "1f1b", "--html", "/no/such/folder/x.html"], "can't be written: No such file"),
        (
            ["simulate", "quickstart", "--communication", "-1"],
            "--communication is -1, and it must be 0, or from 1e-09 to 1e+09",
        ),
        (["simulate", "quickstar"], "did you mean quickstart"),
    ],
)
def test_bad_input_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:  # fmt: skip
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("fault") == 1


def test_all_faults_are_told_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(monkeypatch, capsys, "schedule", "gpip", "--stages", "-2", "--weight-grad", "-1")
    assert status == 2
    assert err.startswith("schedule gpip: 3 faults\n")


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", SCHEDULES.names)
def test_picture_in_the_docs_is_what_the_command_draws(name: str) -> None:
    kept = DOCS / "schedules" / f"{name}.svg"
    again = f"make it again: shardwright schedule {name} --stages 4 --microbatches 8 --svg {kept}"
    assert kept.is_file() and kept.read_text(encoding="utf-8") == picture(study(name).timeline, name), again
    text = (DOCS / "schedules.md").read_text(encoding="utf-8")
    assert f"## {name}\n\n![Timeline of {name}](schedules/{name}.svg)\n" in text


def test_table_in_the_docs_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    _, out, _ = run(monkeypatch, capsys, "schedule", "--compare", "--stages", "4", "--microbatches", "8")
    text = (DOCS / "schedules.md").read_text(encoding="utf-8")
    assert re.findall(r"^```text\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL) == [out]


def test_a_job_is_run_and_drawn_beside_its_simulation(tmp_path: Path) -> None:
    """The executed timeline has the same actions, and its page both timelines."""
    page = tmp_path / "page.html"
    fields = ["plan.dp=1", "plan.tp=1", "plan.sequence_parallel=false", "plan.schedule=zb-h2", "model.layers=2"]
    arguments = [part for field in fields for part in ("--set", field)]
    command = ["simulate", "quickstart", "--execute", "--json", "--html", str(page), *arguments]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    values = json.loads(result.stdout.splitlines()[-1])
    assert values["simulated_s"] > 0
    assert values["executed_s"] > 0
    assert values["error"] == pytest.approx(values["simulated_s"] / values["executed_s"] - 1)
    text = page.read_text(encoding="utf-8")
    assert "zb-h2, as it ran" in text
    assert text.count("<canvas") == 2


def test_what_a_command_reads_is_not_written_over(tmp_path: Path) -> None:
    """Only a file that the option wrote before is replaced."""
    job, other = tmp_path / "j.toml", tmp_path / "other.svg"
    job.write_text('name = "mine"\n')
    for option in ("--svg", "--html", "--trace"):
        done = CliRunner().invoke(cli, ["simulate", str(job), option, str(job)])
        assert isinstance(done.exception, PlanError)
        assert f"{option} {job} is there, and is no file that {option} wrote" in str(done.exception)
    done = CliRunner().invoke(cli, ["layout", str(DOCS / "mixed.toml"), "--toml", str(job)])
    assert isinstance(done.exception, PlanError)
    assert job.read_text() == 'name = "mine"\n'
    for _ in range(2):
        assert CliRunner().invoke(cli, ["simulate", str(job), "--svg", str(other)]).exit_code == 0
    done = CliRunner().invoke(cli, ["schedule", "1f1b", "--html", str(tmp_path / "a"), "--svg", str(tmp_path / "a")])
    assert isinstance(done.exception, PlanError)
