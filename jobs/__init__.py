"""Training jobs and recovery drills for `ray job submit`, with what they share in folders of their own."""
