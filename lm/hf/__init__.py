"""Hugging Face models: families, weights read in place, export."""
