"""Conversion of text to token files."""
