"""Measurements: runs are compared with the predictions and with other runs."""
