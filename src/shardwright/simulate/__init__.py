"""Simulation: programs in time, without torch and without ranks."""
