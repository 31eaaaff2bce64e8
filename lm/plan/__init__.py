"""Memory and time of a training step, predicted from the configuration."""
