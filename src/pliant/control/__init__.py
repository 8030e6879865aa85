"""control: How do workers, launchers and users exchange messages with the coordinator? No policy, no torch."""
