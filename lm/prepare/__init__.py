"""Conversion of text to token files by worker processes."""
