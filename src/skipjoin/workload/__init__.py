"""Workloads: the requests of an experiment, with their arrival times, lengths and prompts."""
