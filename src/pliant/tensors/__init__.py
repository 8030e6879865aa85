"""tensors: gradients, groups, corrections and statistics. The first layer that may import torch; decides nothing."""
