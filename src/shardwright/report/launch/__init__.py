"""Launches of a job on its cluster: a script for Slurm, a manifest for Kubernetes, a command line for torchrun."""
