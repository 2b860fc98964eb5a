"""Studies: one recipe, named changes to it, several seeds, and what the differences are worth."""
