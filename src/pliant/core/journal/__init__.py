"""core.journal: What is written down of a run, and what does it prove?"""
