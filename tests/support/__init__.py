"""Helpers of the tests that need no model: requests, loads, a watched engine core. Standard library and skipjoin.

`thread_ranks` alone needs torch.
"""
