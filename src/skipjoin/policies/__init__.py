"""Scheduling policies, one module per policy kind."""
