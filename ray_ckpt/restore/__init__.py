"""Reading what a checkpoint has, from memory, disk, peers and the storage path."""
