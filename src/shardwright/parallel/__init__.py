"""The strategies as they run: mesh, collectives, tensor, data and pipeline parallelism, and compression."""
