"""Costs of steps and transfers on this machine: measured, estimated, cached."""
