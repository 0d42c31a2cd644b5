"""A scale for each tensor; gradients in e5m2. Micikevicius et al. 2022 (arXiv 2209.05433, section 3)."""

from shardwright.config.float8_facts import Float8Facts

FACTS = Float8Facts(name="tensorwise", place=20, activation="tensor", weight="tensor", gradient="e5m2")
