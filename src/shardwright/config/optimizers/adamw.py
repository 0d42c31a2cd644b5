"""AdamW: Adam with decoupled weight decay. Loshchilov and Hutter 2019 (arXiv 1711.05101)."""

from shardwright.config.optimizer_facts import OptimizerFacts

FACTS = OptimizerFacts(
    name="adamw",
    place=10,
    title="AdamW",
    rule="shardwright.parallel.optimizers.elementwise:adamw",
    moments=lambda spec: ("exp_avg", "exp_avg_sq"),
    decays=("beta1", "beta2"),
    reads=frozenset({"beta1", "beta2", "epsilon"}),
    takes_narrow=True,
    costs_as_adamw=True,
)
