"""One training run (identity, seeding, clocks, records, checkpoints, trackers), and many of them."""
