"""One step, explained: the contents of each device, each operator, each link."""
