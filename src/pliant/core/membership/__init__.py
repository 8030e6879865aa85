"""core.membership: Who takes part in the run now, and what is the coordinator to do next?"""
