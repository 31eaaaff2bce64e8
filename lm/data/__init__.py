"""Data: `tokens` and `text` (floor 2) are sources of samples, `loader` (floor 3) makes batches of them."""
