"""Proofs without a device: the actions of ranks on a device are recorded, and checked against its libraries' rules."""
