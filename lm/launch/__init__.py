"""Launchers: the environment variables they set, and one for several ranks on one machine."""
