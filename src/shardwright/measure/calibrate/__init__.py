"""Measure this machine: operators, collectives, memory; and write the device's file."""
