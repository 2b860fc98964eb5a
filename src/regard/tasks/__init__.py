"""Tasks: what can be trained, one module each."""
