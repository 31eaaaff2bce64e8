"""Process groups, watchdog, preemption and run directory."""
