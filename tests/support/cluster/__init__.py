"""A stand-in for a Determined cluster: its master, searchers, and containers of trials."""
