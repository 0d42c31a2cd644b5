"""No row of a story's tables is faster than the device that computes it, and rows add up to what stands above them."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from shardwright.config.cluster_facts import device_entry, network_gb_per_s, node_gb_per_s
from shardwright.config.job import JobSpec
from shardwright.config.layer_kind import is_layer
from shardwright.config.load import make_job
from shardwright.explain.operator_passes import Collective, OperatorPass, PiecePass
from shardwright.explain.story import Story, tell
from shardwright.report.document import document_text
from shardwright.report.explain.story_tables import operator_rows, passes_parts
from support.cases import small_job
from support.predicted_jobs import DENSE, predicted_jobs

_UNITS = {"PFLOP": 1e15, "TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "FLOP": 1.0}
_SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DIGITS = 0.01  # numbers are written with three digits, so that a quotient of two is off by at most a hundredth


def _read(text: str, units: dict[str, float] | dict[str, int]) -> float:
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number or 0) * units[unit]


def printed(piece: PiecePass, backward: bool) -> Iterator[tuple[str, str, float, float]]:
    """(operator, work, FLOPs, seconds of all columns) of each row that has a name."""
    head, *rows = operator_rows(piece, backward)
    for row in rows:
        cells = dict(zip(head, row, strict=True))
        if cells["operator"] in ("", "gaps"):
            continue
        times = [cells.get(name, "") for name in ("time", "forward", "input gradient", "weight gradient")]
        seconds = sum(_read(text, _SECONDS) for text in [*times, cells.get("computed again", "")])
        yield cells["operator"], cells.get("work", ""), _read(cells.get("FLOP", "") or "0 FLOP", _UNITS), seconds


def peak(job: JobSpec, piece: PiecePass, of: OperatorPass) -> float:
    """FLOP/s of the number type of an operator's products: linear layers may be in fp8, and nothing else is."""
    device, precision = device_entry(job.cluster.device), job.precision
    is_linear = is_layer(piece.kind) and any(p.weight for p in of.products)
    return device.peak_flops(precision.product_number if is_linear else precision.compute)


def collectives(of: OperatorPass) -> Iterator[Collective]:
    yield from (*of.forward, *of.with_graph, *of.backward)


@settings(max_examples=25, deadline=None)
@given(predicted_jobs())
def test_no_row_is_faster_than_the_device(job: JobSpec) -> None:
    story = tell(job)
    if story.step is None:  # the device has no peak for the number type
        assert story.untimed
        return
    memory = device_entry(job.cluster.device).memory_gb_per_s * 1e9
    for piece in story.passes:
        by_name = {of.name: of for of in piece.operators}
        for backward in (False, True):
            for name, work, flops, seconds in printed(piece, backward):
                assert flops <= (1 + _DIGITS) * peak(job, piece, by_name[name]) * seconds, (name, flops, seconds)
                if work.startswith("reads and writes "):
                    moved = _read(work.removeprefix("reads and writes "), _BYTES)
                    assert moved <= (1 + _DIGITS) * memory * seconds, (name, work, seconds)


def is_no_faster_than_its_links(job: JobSpec) -> None:
    """Assert that no collective of a job's story sends its bytes faster than the links carry them."""
    story = tell(job)
    inside, between = (1e9 * of(job.cluster) for of in (node_gb_per_s, network_gb_per_s))
    for piece in story.passes:
        for of in piece.operators:
            for one in collectives(of):
                if one.seconds is None or not one.calls:
                    continue
                for sent, rate in ((one.sent.inside, inside), (one.sent.between, between)):
                    assert sent <= 1.000001 * rate * one.seconds or not rate, (of.name, one)


@settings(max_examples=20, deadline=None)
@given(predicted_jobs())
def test_no_collective_is_faster_than_its_links(job: JobSpec) -> None:
    is_no_faster_than_its_links(job)


@pytest.mark.parametrize("device", ["h100-sxm", "tpu-v5p"])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_tokens_cross_once_to_each_node_with_experts_of_theirs(device: str, top_k: int) -> None:
    """Of two nodes a token with two experts has one in three times of four another one's, and not always."""
    model = DENSE | {"moe": {"experts": 16, "top_k": top_k, "ffn": 1024}}
    plan = {"dp": 2, "tp": 8, "ep": 2, "dispatch": "node-aware"}
    cluster = {"device": device, "devices_per_node": 8, "nodes": 2}
    fields = {"name": "nodes", "model": model, "plan": plan, "cluster": cluster, "batch": {"global_batch_size": 2}}
    job = make_job(fields | {"precision": {"compute": "bf16"}})
    is_no_faster_than_its_links(job)
    dispatched = [
        one
        for piece in tell(job).passes
        for of in piece.operators
        for one in collectives(of)
        if one.axis == "ep" and one.kind == "all_to_all_v" and of.name == "dispatch"
    ]
    nodes_of_token = 2 * (1 - 0.5**top_k)
    for one in dispatched:
        assert one.sent.between == pytest.approx(one.full_bytes * nodes_of_token / min(top_k, 2))
    assert dispatched


@settings(max_examples=20, deadline=None)
@given(predicted_jobs())
def test_rows_add_up(job: JobSpec) -> None:
    """Operators and gaps to the piece, pieces to the step's computing, FLOPs to what MFU and HFU are taken of."""
    story = tell(job)
    for piece in story.passes:
        rows = [row for backward in (False, True) for row in printed(piece, backward)]
        assert sum(flops for _, _, flops, _ in rows) == pytest.approx(piece.flops + piece.backward_flops, rel=_DIGITS)
        if (time := story.times.get((piece.kind, piece.policy))) is None:
            continue
        assert piece.forward_s == pytest.approx(float(time.forward))
        assert piece.backward_s == pytest.approx(float(time.input_grad + time.weight_grad))
        assert piece.again_s == pytest.approx(float(time.again))
    if story.step is not None:
        microbatches = job.num_microbatches / job.plan.num_copies
        computed = sum(
            story.pieces.get((p.kind, p.policy), 0) * ((p.forward_s or 0.0) + (p.backward_s or 0.0))
            for p in story.passes
        )
        assert microbatches * computed == pytest.approx(float(story.step.compute))


def own_head() -> Story:
    fields = small_job("llama", dp=2).model_dump()
    fields["cluster"] |= {"device": "h100-sxm"}
    return tell(make_job(fields | {"precision": {"compute": "bf16"}}))


def test_head_is_in_the_pass_that_computes_it() -> None:
    story = own_head()
    (head,) = (piece for piece in story.passes if piece.kind == "head")
    forward = {name: (work, flops) for name, work, flops, _ in printed(head, backward=False)}
    assert forward["head"] == ("in the backward", 0.0) and head.flops == 0.0
    (of,) = (of for of in head.operators if of.name == "head")
    (product,) = of.products
    assert head.backward_flops == 3 * product.flops
    assert "forward" in operator_rows(head, backward=True)[0]
    assert "The head: 0 FLOP on a rank" in document_text(passes_parts(story.passes, backward=False))
