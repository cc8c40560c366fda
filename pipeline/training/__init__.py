"""Train on one process per GPU, or on several CPU processes."""
