"""Folds of core events, equal in simulator and server."""
