"""Datasets, tokenizers, and the loader that turns them into batches."""
