"""Measurements of cost, and what they share with the check of a GPU: run ``python -m benchmarks.run``."""
