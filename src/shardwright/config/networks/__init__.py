"""The facts of networks between nodes, one file each."""
