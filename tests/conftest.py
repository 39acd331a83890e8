"""What every test shares: hypothesis without deadlines (the machine may be busy), the same examples each run."""

from hypothesis import settings

settings.register_profile("paceline", deadline=None, max_examples=30, derandomize=True, database=None)
# For a hunt: pytest --hypothesis-profile=hunt
settings.register_profile("hunt", deadline=None, max_examples=1500, database=None)
settings.load_profile("paceline")
