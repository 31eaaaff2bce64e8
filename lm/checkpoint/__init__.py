"""Checkpoints: save, verify, retain."""
