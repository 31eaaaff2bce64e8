"""Tasks that score what a model can do."""
