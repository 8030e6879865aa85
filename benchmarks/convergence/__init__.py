"""Time to target accuracy on unequal workers: Pliant beside its rivals, on real data."""
