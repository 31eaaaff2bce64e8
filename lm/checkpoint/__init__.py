"""Checkpoints: save, verify, retain, resume."""
