"""Whose gradients join which update: turns arrivals into actions. Pure; sees ranks and clocks, never tensors."""
