"""Ideas that somebody adds are in no other system: a job with one of them is not written as a job with another."""

from typing import Any

import pytest

from shardwright.config.base import PlanError
from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.config.gate_facts import GATES
from shardwright.config.load import load_job
from shardwright.config.optimizer_facts import OPTIMIZERS
from shardwright.config.rate_schedules import DECAY_SHAPES, RATE_SCHEDULES, DecayShape, RateSchedule
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.interchange.exported import exported
from shardwright.interchange.system import SYSTEMS
from support import (
    added_compression,
    added_context_method,
    added_float8,
    added_gate,
    added_optimizer,
    added_recompute,
    added_schedule,
)

RATES = RateSchedule(name="sawtooth", place=99, peak_fraction=lambda spec, step: 1.0, text=lambda spec, *_: "")
CUBE = DecayShape(name="cube", place=99, remaining=lambda progress: (1 - progress) ** 3)
DENSE, EXPERTS = "llama3-405b-8k", "quickstart-moe"
ADDED: dict[str, tuple[Any, Any, str, list[str]]] = {
    "schedule": (
        SCHEDULES, added_schedule.FACTS, DENSE, ["plan.schedule={}", "plan.virtual_stages=1", "plan.layout=[]"],
    ),
    "context method": (
        CONTEXT_METHODS, added_context_method.FACTS, DENSE, ["plan.cp_method={}", "plan.cp=2", "plan.dp=32"],
    ),
    "recompute": (RECOMPUTES, added_recompute.FACTS, DENSE, ["plan.recompute={}"]),
    "compression": (COMPRESSIONS, added_compression.FACTS, DENSE, ["plan.compress={}"]),
    "fp8 recipe": (FLOAT8_RECIPES, added_float8.FACTS, DENSE, ["precision.float8={}"]),
    "optimizer": (OPTIMIZERS, added_optimizer.FACTS, DENSE, ["optimizer.name={}"]),
    "rates": (RATE_SCHEDULES, RATES, DENSE, ["optimizer.schedule={}"]),
    "decay": (DECAY_SHAPES, CUBE, DENSE, ["optimizer.schedule=wsd", "optimizer.decay_shape={}"]),
    "gate": (GATES, added_gate.FACTS, EXPERTS, ["model.moe.gate={}", "model.moe.softmax_over=all"]),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("idea", ADDED)
def test_a_job_with_it_is_refused(system: str, idea: str) -> None:
    registry, facts, name, overrides = ADDED[idea]
    with registry.also(facts):
        job = load_job(name, [override.format(facts.name) for override in overrides])
        with pytest.raises(PlanError) as refused:
            exported(SYSTEMS[system], job)
    # Systems that know models by name have no model with such a gate.
    assert facts.name in str(refused.value) or (idea == "gate" and "has no such job" in str(refused.value))
