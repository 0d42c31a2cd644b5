"""A module that is not ours, under data parallel and ZeRO."""
