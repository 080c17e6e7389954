"""Training: optimizers, schedules, batches, and the loop."""
