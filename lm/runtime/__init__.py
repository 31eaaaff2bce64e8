"""The processes of a run: groups, watchdog, preemption, run directory."""
