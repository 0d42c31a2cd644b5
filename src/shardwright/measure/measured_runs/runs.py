"""Published runs, row by row: from a line of a table to the run to predict, and to its measurements.

The format is that of benchmarks/truth/README.md. Facts come from columns alone; notes are for people.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.config import catalog
from shardwright.config.attention_kernels import ATTENTION_KERNELS
from shardwright.config.attention_sections import WindowSpec
from shardwright.config.base import error_text
from shardwright.config.cluster import DeviceSpec
from shardwright.config.model_shape import ModelShape
from shardwright.config.moe import ROUTINGS
from shardwright.config.number_types import NUMBER_TYPES, number_called
from shardwright.config.optimizer import ADAMW, OptimizerSpec
from shardwright.config.phrase import say
from shardwright.config.section_shapes import ExpertShape, LatentShape
from shardwright.config.software import software_of
from shardwright.config.units import MIB
from shardwright.cost.calibration import device_of, peak_flops, software_under
from shardwright.layers.embedding_head import logits
from shardwright.layers.layer_tensors import HALF
from shardwright.layers.operators import Context
from shardwright.layers.query import PlanGrid, Run
from shardwright.measure.measured_runs.flops_convention import counted_flops
from shardwright.measure.measured_runs.row_checks import RowCheck, check_row, dp_of, stage_faults
from shardwright.measure.measured_runs.row_facts import GRADS, Row, adapter_of, amount_faults, schedule_of, whole
from shardwright.measure.measured_runs.row_software import knows_software, software_of_row
from shardwright.measure.measured_runs.run_table import TableLine, read_lines


@dataclass(frozen=True)
class Measured:
    """One row: the run to predict (or None, and the `reason`), and its measurements (0 is unknown). `family` is the
    collection of the row, `publication` its document; rows of one `group` have the same plan."""

    id: str
    family: str
    publication: str
    tier: str
    group: str
    is_latest: bool
    device: str
    run: Run | None
    reason: str
    step_s: float
    memory_gb: float
    sees_device: bool  # memory as the driver reports it, which is more than the allocator's
    memory_counter: str  # of the allocator, allocated or reserved, where the row says which
    ran_out: bool  # of memory, instead of running
    says_recompute: bool  # True if the row states its recomputation
    knows_recompute: bool  # True if its source states it, too: the row's may be inferred
    knows_software: bool  # True if the row names software that the catalog describes
    memory_rank: int | None  # the pipeline rank of the memory, -1 the last; None: the one with the most
    line: int  # of the table, where the row begins
    columns: frozenset[str]  # of its table
    faults: tuple[str, ...]  # for which the row is scored apart: what it lacks, and where it contradicts itself

    @property
    def where(self) -> str:
        """The name of the row's place in messages."""
        return f"line {self.line}, {self.id if len(self.id) <= 60 else self.id[:57] + '...'}"


def read_runs(path: Path) -> list[Measured]:
    """All rows of a file, each judged by itself. PlanError if the file is not a table of runs."""
    return [measured(line) for line in read_lines(path)]


def measured(line: TableLine, without: frozenset[str] = frozenset()) -> Measured:
    """The row of a line, with its faults. A row that can't be predicted has a reason. Entries of software in `without`
    are taken not to be in the catalog."""
    unusable = amount_faults(line.row)
    row = {name: value for name, value in line.row.items() if name not in unusable}
    check = check_row(row) if line.row.keys() - {"id"} else RowCheck([], is_readable=False)
    faults = (*line.faults, *unusable.values(), *check.faults)
    run, reason = None, "; ".join(faults)
    if check.is_readable:
        try:
            run = run_of_row(row, without)
            faults += stage_faults(run)
        except (ValueError, KeyError, ArithmeticError) as error:
            reason = error_text(error)
    step_s = _step_s(row, run)
    name = row.get("id", "").strip() or "without id"
    name = name if name.isprintable() else ascii(name)[1:-1]
    return Measured(
        id=name,
        family=name.split("-")[0],
        publication=_publication(row.get("source") or ""),
        tier=row.get("tier") or "A",
        group=row.get("plan_group") or name,
        is_latest=row.get("latest", "1") != "0",
        device=row.get("gpu") or "",
        run=run,
        reason=reason,
        step_s=step_s,
        memory_gb=_float(row, "peak_mem_gb"),
        ran_out=row.get("oom") == "yes",
        says_recompute=bool(row.get("recompute")),
        knows_recompute=bool(row.get("recompute")) and row.get("recompute_inferred") != "1",
        knows_software=knows_software(row, without),
        sees_device=row.get("memory_kind") == "driver",
        memory_counter={"allocator": "allocated", "reserved": "reserved"}.get(row.get("memory_kind") or "", ""),
        memory_rank={"first-rank": 0, "last-rank": -1}.get(row.get("memory_kind") or ""),
        line=line.number,
        columns=frozenset(line.row),
        faults=faults,
    )


def _publication(source: str) -> str:
    """The document that a source names: up to its revision in a repository ("@", hexadecimal), or all of the source."""
    revision = re.search(r"@[0-9a-f]{7,40}\b", source)
    return source[: revision.end()] if revision else source


def _float(row: Row, name: str) -> float:
    return float(row[name]) if row.get(name) else 0.0


def _needed(row: Row, name: str) -> int:
    if not row.get(name):
        raise ValueError(say("the row does not say {name}", name=name))
    return whole(row, name)


def run_of_row(row: Row, without: frozenset[str] = frozenset()) -> Run:
    """The run that a row describes; `without` as in `measured`. ValueError or KeyError names what is missing."""
    spec, software = device_of(row["gpu"]), software_of_row(row, without)
    shape, grid = shape_of_row(row), grid_of_row(row, spec)
    described = software_of(software)
    if shape.is_adapted and not described.adapters:
        raise ValueError(
            say(
                "adapter_rank is {rank}, and what {software} keeps and computes for adapters is not described here; "
                "name software whose adapters are, such as transformers or torchtune",
                rank=shape.adapter.rank,
                software=software.partition("+")[0],
            )
        )
    grid = replace(grid, bucket_bytes=described.bucket_mib * MIB)
    if described.stages_by_cost and grid.virtual == 1 and grid.pp > 1:
        grid = replace(grid, layout=layout_by_cost(shape, int(grid.pp)))
    # Links of a rack or a pod reach beyond a host; devices without links of their own share a host.
    node = whole(row, "gpus_per_node") or (spec.link_domain if spec.link_domain > 1 else min(8, grid.world))
    node = max(node, spec.link_domain) if spec.link_domain > 8 else node
    run = Run(
        shape,
        grid,
        device=row["gpu"] if catalog.is_file(row["gpu"]) else spec.name,
        software=software,
        devices_per_node=node,
        node_bytes_per_s=_float(row, "intra_bw") * 1e9,
        network_bytes_per_s=_float(row, "inter_bw") * 1e9,
        network=row.get("network") or "unknown",
    )
    if not row.get("attention"):
        run = _with_usual_attention(run)
    return run if knows_software(row, without) else _with_usual_loss(run)


def _with_usual_attention(run: Run) -> Run:
    """A run that does not say its kernel of attention: FlashAttention 2 where a device could not hold the scores of one
    layer and microbatch, which its software's kernel keeps."""
    software, device = software_under(run), device_of(run.device)
    if not ATTENTION_KERNELS[software.attention].keeps_scores:
        return run
    context = Context(run.shape, run.grid, software)
    scores_bytes = HALF * float(context.tokens) * run.shape.sequence * run.shape.heads / float(run.grid.tp)
    return replace(run, software=f"{run.software}+flash2") if scores_bytes > device.offered_bytes else run


def _with_usual_loss(run: Run) -> Run:
    """A run of which nothing says what software it had: its loss is by parts of the tokens if a device could not hold
    the logits of all of them."""
    software, device = software_under(run), device_of(run.device)
    whole_bytes = software.logit_peak * float(logits(Context(run.shape, run.grid, software)))
    return replace(run, software=f"{run.software}+loss-by-parts") if whole_bytes > device.offered_bytes else run


def layout_by_cost(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage if blocks, the head behind the layers, are divided by the elements of their products: the
    block that reaches a stage's even share of all of them is the stage's last (nanotron, build_model: its source waits
    until a block passes the share; where one reaches it exactly, time and memory of its runs show that it is the last).
    """
    total = shape.matrix_parameters
    layer = (total - shape.table_elements) / shape.layers
    layers = [0] * num_stages
    stage = 0
    for number in range(1, shape.layers + 1):
        layers[stage] += 1
        stage += number * layer * num_stages >= total * (stage + 1)
    return tuple(layers)


def shape_of_row(row: Row) -> ModelShape:
    """The model that a row describes."""
    hidden, layers = _needed(row, "hidden"), whole(row, "layers_run") or _needed(row, "layers")
    heads = whole(row, "heads") or max(1, hidden // 128)
    kv_heads = whole(row, "kv_heads") or heads
    gated = whole(row, "gated_mlp") == 1
    experts = None
    if whole(row, "experts") > 1:
        width = whole(row, "expert_ffn") or whole(row, "ffn")
        experts = ExpertShape(
            num=whole(row, "experts"),
            topk=whole(row, "topk", 1),
            ffn=width,
            shared_ffn=width * whole(row, "shared_experts"),
            dense_layers=whole(row, "dense_layers"),
            routing=next((routing for routing in ROUTINGS if routing == row.get("routing")), "forced"),
            limited=row.get("limited") == "1",
        )
    latent = None
    if row.get("kv_rank"):
        rotary = {"rotary": whole(row, "rope_dim")} if row.get("rope_dim") else {}
        latent = LatentShape(query_rank=whole(row, "q_rank"), key_rank=whole(row, "kv_rank"), **rotary)
    is_classic = not gated and kv_heads == heads  # as GPT-2: one table for embedding and head, learned positions
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=whole(row, "head_dim") or hidden // heads,
        ffn=whole(row, "ffn") or 4 * hidden,
        gated=gated,
        vocab=whole(row, "vocab") or 51200,
        sequence=_needed(row, "seq"),
        tied=is_classic,
        learned_positions=is_classic,
        bias=row.get("bias") == "1",
        experts=experts,
        latent=latent,
        window=WindowSpec(size=whole(row, "window"), full_every=whole(row, "window_every")),
        adapter=adapter_of(row),
    )
    tied = replace(shape, tied=True)
    is_stated = math.isclose(1e9 * _float(row, "params_b"), tied.parameters, rel_tol=_TIED_WITHIN)
    return tied if is_stated else shape


_TIED_WITHIN = 0.005  # stated parameters this near to those with one table have one


def _schedule(row: Row, pp: int) -> str:
    """The schedule by plan.schedule's name; if the row has none, 1F1B, interleaved if a rank has several stages."""
    if schedule := schedule_of(row.get("schedule") or ""):
        return schedule
    return "sequential" if pp == 1 else "interleaved-1f1b" if whole(row, "vp", 1) > 1 else "1f1b"


def _virtual(row: Row, schedule: str, pp: int) -> int:
    """Stages of a rank. An interleaved schedule without a number has one for each of its layers, as large runs do."""
    if schedule == "interleaved-1f1b" and not row.get("vp"):
        return max(1, round(_needed(row, "layers") / pp))
    return whole(row, "vp", 1) or 1


def grid_of_row(row: Row, device: DeviceSpec) -> PlanGrid:
    """The plan that a row describes."""
    tp, pp, cp, ep = (whole(row, axis, 1) or 1 for axis in ("tp", "pp", "cp", "ep"))
    if not row.get("dp"):
        _needed(row, "gpus")
    dp, microbatch = dp_of(row), whole(row, "mbs", 1)
    recompute = row.get("recompute") or "none"
    schedule = _schedule(row, pp)
    layers, num_recomputed = whole(row, "layers_run") or _needed(row, "layers"), whole(row, "recompute_layers")
    policies = (
        (recompute,) * num_recomputed + ("none",) * (layers - num_recomputed) if 0 < num_recomputed < layers else ()
    )
    precision, has_masters = _precision(row.get("precision") or "", device), row.get("masters") != "none"
    # A parameter without a copy has its gradient and moments in its own numbers: torch's autograd and AdamW, JAX.
    own_bytes = 0 if has_masters else NUMBER_TYPES[precision].num_bytes or HALF
    gradient_bytes = GRADS.get(row.get("grads") or "", own_bytes)
    hosted = (row.get("offload") or "").split()
    return PlanGrid(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        expert_tp=whole(row, "expert_tp", 1),
        virtual=_virtual(row, schedule, pp),
        schedule=schedule,
        sequence_parallel=row.get("sp") == "1" and tp > 1,
        zero=whole(row, "zero_stage"),
        zero_ranks=whole(row, "shard_group"),
        microbatch=microbatch,
        global_batch=whole(row, "gbs") or dp * microbatch,
        recompute=recompute,
        policies=policies,
        precision=precision,
        gradient_bytes=gradient_bytes,
        reduce_bytes=gradient_bytes,
        moment_bytes=GRADS.get(row.get("moments") or "", own_bytes),
        has_masters=has_masters,
        cp_method=row.get("cp_method") or "ring",
        optimizer=OptimizerSpec(name=row.get("optimizer") or ADAMW.name),
        offload_optimizer=float("optimizer" in hosted),
        offload_parameters=float("parameters" in hosted),
        offload_activations=float("activations" in hosted),
    )


def _precision(stated: str, device: DeviceSpec) -> str:
    """The dtype of the products: bf16 if a row has none, or fp16 if a device has no bf16."""
    precision = number_called(stated) or "bf16"
    return "fp16" if precision == "bf16" and not device.peak_flops("bf16") else precision


def _step_s(row: Row, run: Run | None) -> float:
    """Measured seconds of a step; 0 if the row has no rate that can be converted."""
    if row.get("step_time_s"):
        return float(row["step_time_s"])
    if run is None:
        return 0.0
    tokens, gpus = float(run.grid.global_batch * run.shape.sequence), whole(row, "gpus") or int(run.grid.world)
    flops = tokens * counted_flops(row.get("flops_counted") or "", run, 1e9 * _float(row, "params_b"))
    if row.get("tokens_per_s_per_gpu"):
        return tokens / (float(row["tokens_per_s_per_gpu"]) * gpus)
    if row.get("tflops_per_gpu"):
        return flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
    if row.get("mfu") and row.get("flops_counted"):
        return flops / (float(row["mfu"]) * peak_flops(run) * gpus)
    return 0.0
