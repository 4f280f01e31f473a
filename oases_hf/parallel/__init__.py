"""What runs across ranks: the mesh, sharding, layers, loss and gradients."""
