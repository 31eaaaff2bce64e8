"""Where this process runs among the others, and how to start several."""
