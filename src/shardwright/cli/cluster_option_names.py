"""Options that make the cluster of a job, of commands that predict, each with its spellings."""

CLUSTER_OPTIONS = {
    "devices": ("--devices", "--gpus"),
    "device": ("--device",),
    "devices_per_node": ("--devices-per-node",),
    "memory_gib": ("--memory-gib",),
}
