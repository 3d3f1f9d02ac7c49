"""Distributed execution: rank placement, connections, plan messages, and recovery from lost ranks."""
