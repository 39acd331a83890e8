"""Make it so: turns plans into gradient exchanges, role changes and leases over torch.distributed. I/O."""
