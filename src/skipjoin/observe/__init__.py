"""Subscribers to core events, equal in simulator and server."""
