"""Scheduler: which requests run next and hold device KV."""
