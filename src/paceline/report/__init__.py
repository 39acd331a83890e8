"""What people look at: turns the run log into text, JSON and a page. Reads nothing else."""
