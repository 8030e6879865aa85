"""control: typed messages between workers and the coordinator; no policy, no torch."""
