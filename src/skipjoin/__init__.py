"""Skipjoin: LLM serving with iteration-level preemption."""
