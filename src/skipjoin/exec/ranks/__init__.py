"""Distributed execution."""
