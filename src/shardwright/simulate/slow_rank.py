"""One rank of a pipeline that computes more slowly than the others, as a device does whose clocks are held down."""

from dataclasses import dataclass, replace

from shardwright.config.phrase import say
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.timing import Costs


@dataclass(frozen=True)
class SlowRank:
    """A pipeline rank, and the time that its computations take as a multiple of the others' time."""

    rank: int
    times: float

    def slowed(self, costs: Costs, schedule: Schedule) -> Costs:
        """The costs of a schedule in which the stages of this rank take longer to compute. Its order stays: nobody
        knew of the slow rank when it was made. ValueError if another rank holds a stage of it too, since costs are by
        stage."""
        if schedule.placement.num_copies > 1:
            raise ValueError(
                say("two ranks hold each stage, so --slow can't slow one alone; name a schedule whose ranks share none")
            )
        slow_stages = set(schedule.placement.stages_of(self.rank))

        def slower(stage_costs: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(cost * self.times if stage in slow_stages else cost for stage, cost in enumerate(stage_costs))

        return replace(
            costs,
            forward=slower(costs.forward),
            input_grad=slower(costs.input_grad),
            weight_grad=slower(costs.weight_grad),
        )
