"""ZeRO: replicas shard their optimizer state, gradients and parameters."""
