"""Collectives as values: turns numbers of ranks and chunks into who sends what to whom. Pure."""
