"""Metrics: accumulate and log."""
