"""tensors.process_group: How do the workers of an era exchange tickets and sum gradients?"""
