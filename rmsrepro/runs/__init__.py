"""One training run: identity, seeding, clocks, records, checkpoints, environment, trackers; and many of them."""
