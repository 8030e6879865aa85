"""The lab: what changing batches and delayed gradients do to accuracy, on real data, in one process."""
