"""The demonstration: a small real training job with a planted slow rank, three times over."""
