"""What is happening: turns hooks, clocks and gradients into timings and samples. I/O lives here and in `act` only."""
