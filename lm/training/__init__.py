"""What a training step is made of: precision, adapters, sharding, the optimizer, profilers."""
