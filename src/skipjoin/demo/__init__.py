"""Demonstration: the same load against several schedulers, with a table, a picture and a page as results."""
