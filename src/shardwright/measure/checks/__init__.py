"""Proofs without a device: what ranks would do on one is recorded, and checked against the rules of its libraries."""
