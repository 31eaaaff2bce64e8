"""Text to token files, by worker processes."""
