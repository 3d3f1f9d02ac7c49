"""Ledger of KV blocks, and its interface."""
