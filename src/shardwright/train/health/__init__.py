"""Health checks of a run: losses, gradients, weights, replicas, stragglers and GPUs."""
