"""Workloads: the requests of an experiment."""
