"""Adam, with weight decay in the gradient. Kingma and Ba 2015 (arXiv 1412.6980)."""

from shardwright.config.optimizer_facts import OptimizerFacts

FACTS = OptimizerFacts(
    name="adam",
    place=20,
    title="Adam",
    rule="shardwright.parallel.optimizers.elementwise:adam",
    moments=lambda spec: ("exp_avg", "exp_avg_sq"),
    decays=("beta1", "beta2"),
    reads=frozenset({"beta1", "beta2", "epsilon"}),
    takes_narrow=True,
    costs_as_adamw=True,
)
