"""Launchers: the environment variables they set, and a launcher for several ranks on one machine."""
