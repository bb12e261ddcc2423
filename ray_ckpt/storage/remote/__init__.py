"""The storage path: a folder that all nodes mount, or an object store."""
