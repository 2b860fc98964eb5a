"""Training: gradients, schedules, checkpoints. One loop for every task."""
