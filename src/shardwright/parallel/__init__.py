"""How each strategy runs: mesh, collectives, tensor, data and pipeline parallelism, and compression."""
