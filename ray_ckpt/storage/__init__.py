"""Files and stores: the commit log's seam, the remote tier, and one node's staging folder."""
