"""Descriptions of a model, a cluster, a plan and a job, as validated data. Nothing here imports torch."""
