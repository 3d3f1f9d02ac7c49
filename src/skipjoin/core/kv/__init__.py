"""KV blocks: the ledger that accounts for them, and the interface that the scheduler and policies use."""
