"""A step cut along its batch: one capture for each size of a slice, and arrays copied to make K micro-batches of it."""
