"""tensors.process_group: How do the workers of an era gather tickets and sum gradients?"""
