"""worker.evaluation: How does an ``evaluate`` gather sums and outputs from all workers?"""
