"""From what a model computes of a micro-batch to the terms of the loss that a step averages."""
