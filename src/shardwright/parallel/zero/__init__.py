"""ZeRO: replicas share their optimizer state, gradients and parameters."""
