"""The benchmark: Cloche through its public library against a plain ipykernel, in one run."""
