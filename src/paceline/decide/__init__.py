"""What to do about it: turns verdicts and forecasts into a plan with a reason and a predicted gain. Pure."""
