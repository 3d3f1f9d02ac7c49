"""Workloads, the load client, results and plots."""
