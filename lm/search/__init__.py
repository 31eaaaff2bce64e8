"""Searches of hyperparameters on this machine, as Determined's master runs them on a cluster."""
