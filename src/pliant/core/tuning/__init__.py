"""core.tuning: What is measured during the rounds, and which delay, learning rate, loss scale and batch follow?"""
