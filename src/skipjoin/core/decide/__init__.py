"""Scheduler: plans engine steps and decides which requests hold device KV."""
