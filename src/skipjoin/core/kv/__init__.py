"""KV blocks: the ledger that accounts for them, and its interface to the scheduler and the policies."""
