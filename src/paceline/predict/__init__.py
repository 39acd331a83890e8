"""What it means and what comes next: turns timings into verdicts and forecasts. Pure."""
