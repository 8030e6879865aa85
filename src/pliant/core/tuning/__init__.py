"""core.tuning: What is measured in the rounds, and which delay, rate, loss scale and batch follow from it?"""
