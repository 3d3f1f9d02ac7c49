"""Scheduling core. It uses the standard library only, and time is always an argument."""
