"""Scheduling core: standard library only, and time is an argument."""
