"""Shared code of the figures of papers' evaluations: runs, reports and pictures."""
