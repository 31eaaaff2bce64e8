"""Hugging Face models: families, weights, export."""
