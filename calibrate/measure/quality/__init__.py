"""What choosing blocks costs a model: measured with torch, on a CPU or a GPU."""
