"""Subscribers to core events: the same figures, metrics and traces in the simulator and in the server."""
