"""Running Programs: all ranks in lockstep, op by op, or compiled; and starting processes."""
