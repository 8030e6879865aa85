"""worker: What does one training process do, from drawing a micro-batch to applying an update?"""
