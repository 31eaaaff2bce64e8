"""Process groups, watchdog, signals that stop a run, and run directory."""
