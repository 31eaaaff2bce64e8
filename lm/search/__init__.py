"""Searches of hyperparameters on this machine, by Optuna."""
