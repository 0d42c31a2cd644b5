"""The order of work: a schedule is data, made without torch, and everything else reads it."""
