"""Simulation: programs in time, without torch and without ranks."""

from shardwright.config.package_call import refuse_calls

refuse_calls(__name__)
