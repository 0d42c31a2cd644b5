"""One step, told: what each device holds, each operator, each link."""
