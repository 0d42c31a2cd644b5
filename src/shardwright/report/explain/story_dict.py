"""The story of a step as JSON."""

from dataclasses import asdict
from typing import Any

from shardwright.explain.operator_passes import OperatorPass, PiecePass
from shardwright.explain.story import Portion, Story
from shardwright.planner.advice.rules import first_place_of_state
from shardwright.report.explain.story_tables import layout_dict
from shardwright.report.prediction_notes import job_notes


def story_dict(story: Story) -> dict[str, Any]:
    """A story for `--json`, with every chapter: bytes, FLOPs and seconds, which are null if `untimed` has a reason."""
    step, place = story.step, first_place_of_state(story.job)
    return {
        "job": story.job.name,
        "notes": job_notes(story.job),
        "plan": story.job.plan.model_dump(),
        "untimed": story.untimed,
        "batch": [_portion(portion) for portion in story.portions],
        "rank_order": story.order,
        "first_node": story.first_node,
        "groups": [{name: value for name, value in asdict(group).items() if name != "lies"} for group in story.groups],
        "links": [asdict(link) for link in story.links],
        "experts": None if story.experts is None else asdict(story.experts),
        "memory": {rank: account.as_dict() for rank, account in story.memory.items()},
        "predicted_memory": [account.as_dict() for account in story.predicted],
        "choosing": None if place is None else {"says": place.says, "agrees": place.agrees},
        "effects": [
            {"strategy": e.strategy, "does": e.does, "with": e.with_it.as_dict(), "without": e.without_it.as_dict()}
            for e in story.effects
        ],
        "passes": [_piece(piece) for piece in story.passes],
        "pipeline_rank": story.rank,
        "pieces": [
            {"kind": kind, "recomputes": policy, "count": count} for (kind, policy), count in story.pieces.items()
        ],
        "crossings": [asdict(crossing) for crossing in story.crossings],
        "step": None if step is None else asdict(step),
        "tokens_per_s": story.tokens_per_s,
        "layouts": layout_dict(story.layouts),
        "contradictions": [asdict(contradiction) for contradiction in story.contradictions],
    }


def _portion(portion: Portion) -> dict[str, Any]:
    """A portion of the batch, whose kind is named "of" in JSON."""
    values = asdict(portion)
    return {"of": values.pop("kind")} | values


def _piece(piece: PiecePass) -> dict[str, Any]:
    return {
        "kind": piece.kind,
        "recomputes": piece.policy,
        "flops": piece.flops,
        "forward_s": piece.forward_s,
        "backward_s": piece.backward_s,
        "again_s": piece.again_s,
        "operators": [_operator(operator) for operator in piece.operators],
    }


def _operator(operator: OperatorPass) -> dict[str, Any]:
    products = [
        {"rows": float(p.rows), "inner": float(p.inner), "columns": float(p.columns), "batch": float(p.batch)}
        for p in operator.products
    ]
    plain = {key: value for key, value in vars(operator).items() if key not in ("products", *_PASSES)}
    return plain | {"products": products} | {name: [asdict(c) for c in getattr(operator, name)] for name in _PASSES}


_PASSES = ("forward", "with_graph", "backward")
