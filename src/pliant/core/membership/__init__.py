"""core.membership: Which workers take part in the run now, and what does the coordinator do next?"""
