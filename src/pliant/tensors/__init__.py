"""tensors: How are gradients, weights and state stored, summed and sent? The first layer that may import torch; it
decides nothing."""
