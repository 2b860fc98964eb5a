"""Examples and padding: where text pairs come from, before they become tensors."""
